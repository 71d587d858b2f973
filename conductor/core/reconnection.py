"""What a broken control stream may have swallowed, found by comparing what both sides still have of each other's work.

The instance says its outcomes again and then which attempts it has. What it has and nobody waits for is cancelled; what
should be there and is not was lost on the way and is planned again. An attempt assigned over the new stream is not
among the expected: the instance may hear of it after it counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from conductor.core.attempts import Attempts
from conductor.core.decisions import AttemptFailed, CancelAttempt, Decision
from conductor.core.instance import Instance
from segue.ids import AttemptRef, InstanceRef


class Reconnections:
    """Instances between their new stream and their word of what they have."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._expected: dict[InstanceRef, list[AttemptRef]] = {}

    def begin(self, ref: InstanceRef) -> None:
        """A new stream stands: whatever is live now was assigned before it."""
        self._expected[ref] = [attempt.key for attempt in self._attempts if ref in attempt.live_sides()]

    def drop(self, ref: InstanceRef) -> None:
        self._expected.pop(ref, None)

    def compare(self, instance: Instance, held: Sequence[AttemptRef]) -> list[Decision]:
        decisions: list[Decision] = []
        for key in held:
            attempt = self._attempts.get(key.request_id)
            if attempt is None or attempt.key != key:
                decisions.append(CancelAttempt(ref=instance.ref, key=key, reason="nobody waits for it any more"))
        missing = set(self._expected.pop(instance.ref, ())).difference(held)
        for key in sorted(missing):
            attempt = self._attempts.get(key.request_id)
            if attempt is not None and attempt.key == key and instance.ref in attempt.live_sides():
                decisions += self._attempts.end(attempt, "the other side lost it", told=instance.ref)
                reason = f"{instance.manifest.name} lost it with a broken connection"
                decisions.append(AttemptFailed(key=key, reason=reason))
        return decisions
