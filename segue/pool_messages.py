"""What is asked of whoever starts and ends instances, and what it answers, as plain records."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class InstanceState(StrEnum):
    """Of one instance while its pool changes size."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """It takes nothing new; what it runs ends, or goes on elsewhere."""
    GONE = "gone"
    FAILED = "failed"
    """It was started again and again and is given up."""


class ScaleOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Give `pool` (a role's name) this many instances. `op` is the asker's own number for it."""

    op: int
    pool: str
    instances: int


class InstanceChange(msgspec.Struct, frozen=True):
    name: str
    state: InstanceState
    reason: str = ""


class ScaleDone(msgspec.Struct, frozen=True):
    """The end of an order; `instances` serve."""

    instances: int


class ScaleRefused(msgspec.Struct, frozen=True):
    """The end of an order that cannot be carried out: nothing (more) is changed. `field` names what was wrong with it;
    empty: it cannot be done now."""

    field: str
    reason: str


ScaleAnswer = InstanceChange | ScaleDone | ScaleRefused
