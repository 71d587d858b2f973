"""Mooncake's admission under overload (arXiv 2407.00079, section 7), in its three published forms.

| name | the decode side is looked at |
| --- | --- |
| mooncake-baseline | when the prompt is computed: what D cannot take then was prefilled for nothing |
| mooncake-early | at arrival, by D's load of that moment: what is on its way through P is not seen, and P and D swing |
| mooncake-predicted | at arrival, by D's load at landing: every decode takes the same time `t_d`; pipeline included |

The `-checked` forms look again at landing, as the baseline does: section 3 of the paper says of its serving system that
the local scheduler of the decode instance checks the objective once more, and may waste a prefill; section 7 does not
say whether it did in the comparison.

All refuse at arrival what would miss the objective of TTFT. Load of D is the step time of its batch against the
objective of TPOT. D is the one with the least, what is on its way to it included (the Conductor sent it there), and P
the one with the least predicted TTFT by its own cache (`Mooncake`).
"""

from __future__ import annotations

from collections import deque

from conductor.core.fleet import Candidates
from conductor.core.health import HealthBook
from conductor.core.instance import Instance
from conductor.core.policy import Choice, Query, Refusal, can_decode
from segue.ids import AttemptRef
from simulator.policies import Mooncake, PolicyContext, fitting, least, pair_choice

RETRY_AFTER_MS = 1_000


class EarlyRejection:
    """`uniform_decode_us` is t_d; 0: by the load of the moment. `at_arrival`, `at_landing`: when D is asked."""

    def __init__(
        self,
        context: PolicyContext,
        *,
        uniform_decode_us: float = 0.0,
        at_arrival: bool = True,
        at_landing: bool = False,
    ) -> None:
        self._context = context
        self._mooncake = Mooncake(context)
        self._uniform_us = uniform_decode_us
        self._asks_at_arrival = at_arrival
        self._asks_at_landing = at_landing
        self._landings: dict[str, deque[tuple[float, int]]] = {}
        """(predicted landing, tokens) of what was sent to each decode instance."""
        self._decodes: dict[AttemptRef, tuple[Instance, int]] = {}
        if at_landing:
            context.notes.at_landing = self._at_landing

    def rank(self, query: Query, candidates: Candidates, health: HealthBook) -> list[Choice] | Refusal:
        prefills = fitting(query, candidates.prefills)
        decodes = [instance for instance in candidates.decodes if can_decode(query, instance)]
        if not prefills:
            return []
        if not decodes:
            return _refusal("decode", "no decode instance has room")
        known = query.request.tokens_known
        prefill = least(query, prefills, lambda instance: self._mooncake.ttft_us(query, instance, 0))
        ttft_us = self._mooncake.ttft_us(query, prefill, 0)
        if ttft_us > self._context.slo_ttft_us:
            return _refusal("prefill", f"TTFT {ttft_us / 1e6:.2f} s predicted")
        landing_us = query.now_us + ttft_us
        if self._uniform_us:
            decode = least(query, decodes, lambda instance: self._tbt_us(instance, known, landing_us))
        else:
            decode = least(query, decodes, lambda instance: self._mooncake.tbt_us(query, instance))
        tbt_us = self._tbt_us(decode, known, landing_us)
        if self._asks_at_arrival and tbt_us > self._context.slo_tpot_us:
            return _refusal("decode", f"TBT {tbt_us / 1e3:.1f} ms predicted")
        self._landings.setdefault(decode.uuid, deque()).append((landing_us, known))
        if self._asks_at_landing:
            self._decodes[query.request.key] = (decode, known)
        return [pair_choice(query, prefill, decode)]

    def _tbt_us(self, instance: Instance, tokens: int, landing_us: float) -> float:
        batch, kv_tokens = self._batch_at(instance, landing_us) if self._uniform_us else _batch_now(instance)
        return self._context.cost.decode.us(batch + 1, kv_tokens + tokens)

    def _batch_at(self, instance: Instance, at_us: float) -> tuple[int, int]:
        sent = self._landings.get(instance.uuid, deque())
        while sent and sent[0][0] + self._uniform_us < at_us - self._uniform_us:
            sent.popleft()
        there = [tokens for landed_us, tokens in sent if landed_us <= at_us < landed_us + self._uniform_us]
        return len(there), sum(there)

    def _at_landing(self, key: AttemptRef) -> str:
        """Why D will not take what has just arrived; empty when it does. It is in the batch already."""
        instance, tokens = self._decodes.pop(key)
        batch, kv_tokens = _batch_now(instance)
        tbt_us = self._context.cost.decode.us(batch + 1, kv_tokens + tokens)
        return f"TBT {tbt_us / 1e3:.1f} ms at landing" if tbt_us > self._context.slo_tpot_us else ""


def _batch_now(instance: Instance) -> tuple[int, int]:
    """As last reported: what runs, and nothing that is on its way."""
    report = instance.load
    return (0, 0) if report is None else (report.running, report.tokens_running)


def _refusal(resource: str, reason: str) -> Refusal:
    return Refusal(reason=reason, resource=resource, retry_after_ms=RETRY_AFTER_MS)
