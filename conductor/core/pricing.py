"""What time is worth: latencies as losses, so that one request's wait can be weighed against another's.

A latency x, as a share of its target, loses

    loss(x) = LINEAR * x + x^4          x <= 1
              LINEAR * x + 4 x - 3      x > 1

Far below the target time is nearly free, so that slack is spent where it helps others; near it every further delay
counts in full, and beyond it each second weighs the same: a request that is late already is still worth hurrying, and
no placement is attractive because all is lost anyway. The derivative turns a delay imposed on others into a loss.
"""

from __future__ import annotations

import msgspec

from segue.cost_model import CostModel

LINEAR = 0.05
"""Keeps the fastest of several comfortable choices the best one."""


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """Objectives that losses are measured by. They scale and rank; whether a miss is refused is decided elsewhere."""

    ttft_us: float = 2_000_000.0
    ttft_factor: float = 3.0
    """A prompt may take so many times its unloaded prefill, where that is more than `ttft_us`."""
    tpot_us: float = 50_000.0

    def ttft_us_of(self, cost: CostModel, tokens_prompt: int) -> float:
        return max(self.ttft_us, self.ttft_factor * cost.prefill.us(tokens_prompt))


def loss(share: float) -> float:
    """Of a latency that is `share` of its target."""
    if share > 1.0:
        return LINEAR * share + 4.0 * share - 3.0
    square = share * share
    return LINEAR * share + square * square


def loss_slope(share: float) -> float:
    """What a little more latency costs, per target."""
    return LINEAR + 4.0 * min(share, 1.0) ** 3
