"""Who is registered: manifests, model cards and signs of life. The edge asks it; the core is told what follows.

Cards are kept by digest, so that a model's tokenizer crosses the wire once however many instances serve it.
"""

from __future__ import annotations

from collections.abc import Iterable

from segue.ids import InstanceRef
from segue.limits import INSTANCE_NAME_CHARS_MAX, INSTANCES_MAX
from segue.manifest import InstanceManifest
from segue.model_card import ModelCard

HEARTBEAT_MS = 1000
HEARTBEATS_MISSED_MAX = 3
"""Silent for this many intervals: lost. A long step does not count, heartbeats come from the worker's I/O loop."""

CARDS_MAX = 64
"""Cards of models that no instance serves any more are dropped past this number."""


class _Member:
    __slots__ = ("heard_us", "manifest")

    def __init__(self, manifest: InstanceManifest, now_us: int) -> None:
        self.manifest = manifest
        self.heard_us = now_us


class Registry:
    """Pure bookkeeping; times are microseconds of the caller's clock. `models` empty: any model may register."""

    def __init__(self, models: Iterable[str] = ()) -> None:
        self._models = frozenset(models)
        self._members: dict[str, _Member] = {}
        self._cards: dict[str, ModelCard] = {}

    def refusal(self, manifest: InstanceManifest) -> str | None:
        """Why `manifest` may not register, or None."""
        if self._models and manifest.model not in self._models:
            return f"model {manifest.model!r} is not one of those configured: {', '.join(sorted(self._models))}"
        present = self._members.get(manifest.ref.uuid)
        if present is not None and present.manifest.ref.incarnation > manifest.ref.incarnation:
            return f"a newer incarnation of {manifest.ref.uuid} is registered"
        for member in self._members.values():
            other = member.manifest
            if other.name == manifest.name and other.ref.uuid != manifest.ref.uuid:
                return f"the name {manifest.name} is taken by instance {other.ref.uuid}"
        if present is None and len(self._members) >= INSTANCES_MAX:
            return f"{INSTANCES_MAX} instances are registered"
        return _malformed(manifest)

    def present(self, uuid: str) -> InstanceRef | None:
        """The registered incarnation."""
        member = self._members.get(uuid)
        return None if member is None else member.manifest.ref

    def needs_card(self, manifest: InstanceManifest) -> bool:
        return manifest.card_digest not in self._cards

    def add(self, manifest: InstanceManifest, now_us: int) -> None:
        """`refusal` returned None. An older incarnation is replaced."""
        self._members[manifest.ref.uuid] = _Member(manifest, now_us)

    def remove(self, ref: InstanceRef) -> None:
        if self.present(ref.uuid) == ref:
            del self._members[ref.uuid]

    def heard(self, ref: InstanceRef, now_us: int) -> None:
        if self.present(ref.uuid) == ref:
            self._members[ref.uuid].heard_us = now_us

    def excuse(self, us: int, now_us: int) -> None:
        """Nobody could be heard for this long, because the listener itself was stopped: it counts against no member."""
        for member in self._members.values():
            member.heard_us = min(member.heard_us + us, now_us)

    def silent(self, now_us: int) -> list[InstanceRef]:
        """Members that said nothing for HEARTBEATS_MISSED_MAX intervals."""
        limit_us = HEARTBEAT_MS * 1000 * HEARTBEATS_MISSED_MAX
        return [m.manifest.ref for m in self._members.values() if now_us - m.heard_us > limit_us]

    def add_card(self, card: ModelCard) -> None:
        if len(self._cards) >= CARDS_MAX:
            used = {member.manifest.card_digest for member in self._members.values()}
            self._cards = {digest: kept for digest, kept in self._cards.items() if digest in used}
        self._cards[card.digest] = card

    def card(self, digest: str) -> ModelCard | None:
        return self._cards.get(digest)


def _malformed(manifest: InstanceManifest) -> str | None:
    """What a manifest must hold so that nothing below divides by zero or waits forever."""
    positive = {
        "pages_total": manifest.pages_total,
        "max_num_seqs": manifest.max_num_seqs,
        "max_num_batched_tokens": manifest.max_num_batched_tokens,
        "layout.block_size": manifest.layout.block_size,
    }
    for name, value in positive.items():
        if value < 1:
            return f"{name} is {value}, must be positive"
    if not manifest.ref.uuid or not manifest.name:
        return "uuid and name must not be empty"
    if max(len(manifest.ref.uuid), len(manifest.name)) > INSTANCE_NAME_CHARS_MAX:
        return f"uuid and name take at most {INSTANCE_NAME_CHARS_MAX} characters"
    try:
        bytes.fromhex(manifest.kv_root)
    except ValueError:
        return "kv_root is not hexadecimal"
    return None
