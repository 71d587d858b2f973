"""What the Conductor believes about times and values beyond the state of single instances, for policies to read."""

from __future__ import annotations

import msgspec

from conductor.core.links import LinkBook
from conductor.core.pricing import Targets
from conductor.core.reuse import ReuseBook
from segue.cost_model import CostModel, DecodeCost, PrefillCost

PRIOR_COST = CostModel(
    prefill=PrefillCost(base_us=1_000.0, token_us=100.0, pair_us=0.0, floor_us=10_000.0),
    decode=DecodeCost(base_us=10_000.0, row_us=100.0, kv_token_us=0.02),
    kv_token_bytes=0,
)
"""An accelerator with a model of some ten billion parameters. Each instance's `slowness` corrects what is wrong for it;
only the ratio of prefill to decode stays a guess until a cost model is given."""


class Beliefs(msgspec.Struct, frozen=True, kw_only=True):
    """The books learn; the record only names them. One for each Conductor."""

    cost: CostModel = PRIOR_COST
    targets: Targets = Targets()
    links: LinkBook = msgspec.field(default_factory=LinkBook)
    reuse: ReuseBook = msgspec.field(default_factory=ReuseBook)
