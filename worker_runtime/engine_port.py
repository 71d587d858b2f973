"""What a worker needs of an engine. `engine.engine.Engine` is one; `toy_engine` is one without tensors."""

from __future__ import annotations

from typing import Protocol

from segue.kv_layout import KvLayout
from segue.model_card import ModelCard
from segue.plan import BatchPlan, PlanResult


class EnginePort(Protocol):
    """Called by one thread. Results come in launch order; at most `pipeline_depth` + 1 plans are launched ahead."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def layout(self) -> KvLayout: ...

    @property
    def kv_root(self) -> bytes: ...

    @property
    def numerics(self) -> str:
        """What the bits of results depend on, where they are promised; else empty."""

    @property
    def pages_total(self) -> int: ...

    def launch(self, plan: BatchPlan) -> None: ...

    def collect(self) -> PlanResult: ...

    def close(self) -> None: ...
