"""Members, and who may work with whom.

Instances whose KV is exchangeable form a *group*: `pairing_refusal` between any two is None. All pairs of a group are
usable and no pair across groups is. A model is served by one group at a time (its first usable one, until it is usable
no more), because a request's block hashes carry that group's KV root.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from conductor.core.instance import Instance
from segue.ids import InstanceRef
from segue.manifest import InstanceManifest, Role, pairing_refusal


class Candidates(msgspec.Struct, frozen=True, kw_only=True):
    """Members of one group that take new work; every (prefill, decode) pair is compatible."""

    prefills: Sequence[Instance] = ()
    decodes: Sequence[Instance] = ()
    locals: Sequence[Instance] = ()
    """Instances that would prefill and decode."""
    prefills_by_uuid: Mapping[str, Instance] = {}
    decodes_by_uuid: Mapping[str, Instance] = {}
    """Of `decodes` and `locals`."""
    tokens_longest: int = 0
    """Longest sequence, prompt and output, that some of them could hold."""
    tokens_longest_prompt: int = 0

    @property
    def usable(self) -> bool:
        return bool(self.locals) or (bool(self.prefills) and bool(self.decodes))


class Group:
    """Instances with exchangeable KV, in order of joining."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.members: dict[str, Instance] = {}
        self.candidates = Candidates()
        """As of the last change of membership."""

    @property
    def representative(self) -> InstanceManifest:
        return next(iter(self.members.values())).manifest

    @property
    def kv_root(self) -> bytes:
        return bytes.fromhex(self.representative.kv_root)

    def active(self, *roles: Role) -> list[Instance]:
        """Members that take new work."""
        return [member for member in self.members.values() if not member.draining and member.manifest.role in roles]

    def fits(self, manifest: InstanceManifest) -> bool:
        return pairing_refusal(self.representative, manifest) is None


class Fleet:
    """All instances by uuid, and the groups of each model."""

    def __init__(self, models_known: Iterable[str] = ()) -> None:
        self.instances: dict[str, Instance] = {}
        self._models_known = set(models_known)
        self._groups: dict[str, list[Group]] = {}
        self._served: dict[str, Group] = {}

    def find(self, ref: InstanceRef | None) -> Instance | None:
        """The instance while this very incarnation is a member."""
        instance = None if ref is None else self.instances.get(ref.uuid)
        return instance if instance is not None and instance.ref == ref else None

    def add(self, instance: Instance) -> None:
        model = instance.manifest.model
        self._models_known.add(model)
        self.instances[instance.uuid] = instance
        groups = self._groups.setdefault(model, [])
        group = next((group for group in groups if group.fits(instance.manifest)), None)
        if group is None:
            group = Group(model)
            groups.append(group)
        group.members[instance.uuid] = instance
        self._settle(model)

    def mark_draining(self, instance: Instance) -> None:
        """It takes no new work from now on."""
        instance.draining = True
        self._settle(instance.manifest.model)

    def remove(self, instance: Instance) -> None:
        del self.instances[instance.uuid]
        groups = self._groups[instance.manifest.model]
        for group in groups:
            group.members.pop(instance.uuid, None)
        groups[:] = [group for group in groups if group.members]
        if not groups:
            del self._groups[instance.manifest.model]
        self._settle(instance.manifest.model)

    def is_known(self, model: str) -> bool:
        return model in self._models_known

    def models(self) -> list[str]:
        return sorted(self._groups)

    def served_group(self, model: str) -> Group | None:
        """The group that serves `model` now, or None (`unavailability` says why)."""
        return self._served.get(model)

    def group_of_root(self, model: str, kv_root: bytes) -> Group | None:
        """The usable group that a request's hashes were made for; an empty root means the served one."""
        if not kv_root:
            return self.served_group(model)
        groups = self._groups.get(model, [])
        return next((group for group in groups if group.kv_root == kv_root and group.candidates.usable), None)

    def unavailability(self, model: str) -> str:
        """Why no group of `model` is usable."""
        members = [member for group in self._groups.get(model, []) for member in group.members.values()]
        if not members:
            return f"no instance serves {model}"
        active = [member.manifest for member in members if not member.draining]
        if not active:
            return f"every instance of {model} is draining"
        decodes = [manifest for manifest in active if manifest.role is Role.DECODE]
        if not decodes:
            return f"no decode instance serves {model}"
        for prefill in (manifest for manifest in active if manifest.role is Role.PREFILL):
            for decode in decodes:
                refusal = pairing_refusal(prefill, decode)
                if refusal is not None:
                    return f"no compatible pair of instances serves {model}: {refusal}"
        return f"no instance serves {model} with the KV root the request was hashed for"

    def _settle(self, model: str) -> None:
        """Choose who serves `model`: as before while that group is usable, else the oldest usable one."""
        groups = self._groups.get(model, [])
        locally = not any(group.active(Role.PREFILL) for group in groups)
        for group in groups:
            group.candidates = _candidates(group, prefills_locally=locally)
        served = self._served.get(model)
        if served is None or served not in groups or not served.candidates.usable:
            served = next((group for group in groups if group.candidates.usable), None)
        if served is None:
            self._served.pop(model, None)
        else:
            self._served[model] = served


def _candidates(group: Group, *, prefills_locally: bool) -> Candidates:
    """Decode instances prefill by themselves when their model has no prefill instance at all."""
    prefills, decodes = group.active(Role.PREFILL), group.active(Role.DECODE)
    locals_ = group.active(Role.AGGREGATED, *((Role.DECODE,) if prefills_locally else ()))
    finishing = locals_ + (decodes if prefills else [])
    longest = max((instance.tokens_capacity for instance in finishing), default=0)
    longest_prompt = max((instance.tokens_capacity for instance in locals_ + prefills), default=0)
    return Candidates(
        prefills=prefills,
        decodes=decodes,
        locals=locals_,
        prefills_by_uuid={instance.uuid: instance for instance in prefills},
        decodes_by_uuid={instance.uuid: instance for instance in (*decodes, *locals_)},
        tokens_longest=longest,
        tokens_longest_prompt=min(longest, longest_prompt),
    )
