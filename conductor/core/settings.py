"""Everything that a Conductor core is started with, as a record: what a recording begins with, so that it replays."""

from __future__ import annotations

import msgspec

from conductor.core.admission import Objectives
from conductor.core.beliefs import PRIOR_COST, Beliefs
from conductor.core.machine import ConductorCore
from conductor.core.pricing import Targets
from segue.cost_model import CostModel
from segue.limits import QUEUED_REQUESTS_MAX

TARGET_US_MAX = 60_000_000.0
"""An objective that was left open ranks nothing; a minute is as good as none."""


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    models_known: tuple[str, ...] = ()
    queue_max: int = QUEUED_REQUESTS_MAX
    objectives: Objectives | None = None
    cost: CostModel | None = None
    tenant_weights: dict[str, float] = {}
    tenant_queue_max: int = 0


def make_core(settings: CoreSettings) -> ConductorCore:
    """With the default policy. Objectives that reject are also those by which losses are weighed."""
    asked, standard = settings.objectives, Targets()
    targets = standard
    if asked is not None:
        targets = Targets(
            ttft_us=min(asked.ttft_us, TARGET_US_MAX),
            ttft_factor=asked.ttft_factor,
            tpot_us=asked.tpot_us if asked.tpot_us < TARGET_US_MAX else standard.tpot_us,
        )
    return ConductorCore(
        models_known=settings.models_known,
        queue_max=settings.queue_max,
        beliefs=Beliefs(cost=settings.cost or PRIOR_COST, targets=targets),
        objectives=asked,
        cost=settings.cost,
        tenant_weights=settings.tenant_weights,
        tenant_queue_max=settings.tenant_queue_max,
    )
