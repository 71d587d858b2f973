"""What a gateway needs of a Conductor and what it offers in return. In one process the two call each other directly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from conductor.core.decision_log import Explanation, RegretTotals
from conductor.core.latency import Coverage
from segue.errors import RequestError
from segue.ids import InstanceRef
from segue.kv_events import LoadReport
from segue.manifest import InstanceManifest
from segue.model_card import ModelCard
from segue.plan import PromptScores, TokenLogprobs
from segue.pool_messages import InstanceChange, ScaleDone
from segue.sampling_params import SamplingParams


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model with at least one usable pair of instances."""

    card: ModelCard
    kv_root: bytes
    """Root of unsalted block-hash chains: what `segue.block_hash.tenant_root` starts from."""
    block_size: int
    max_model_len: int
    """The least of the instances'."""


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt that a gateway asks the Conductor to place. Token ids as little-endian u32 bytes."""

    request_id: str
    attempt: int
    model: str
    token_ids: bytes
    tokens_prompt: int
    hash_root: bytes
    block_hashes: list[bytes]
    """Chain over the full blocks of `token_ids`."""
    sampling: SamplingParams
    gateway: str
    tenant: str = ""
    deadline_ms: int = 0
    """Left until the client's deadline, from now; 0: none."""
    priority: int = 0
    """Smaller is more urgent; equal priorities are served in order of arrival."""
    kv_root: bytes = b""
    """The `ServedModel.kv_root` that the hashes were made from; empty: of the model as served now."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    prefill: str
    """Instance name; empty when the decode instance prefills locally."""
    decode: str


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    manifest: InstanceManifest
    load: LoadReport | None
    draining: bool
    booked_requests: int = 0
    """What this Conductor's live attempts hold here by its own book; zero when there are none."""
    booked_pages: int = 0
    booked_tokens: int = 0


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    instances: list[InstanceView]
    models: list[ServedModel]
    requests_queued: int
    predictions: list[PredictionView] = []


class PredictionView(msgspec.Struct, frozen=True, kw_only=True):
    """How right predictions of one kind were, for one model."""

    coverage: Coverage
    regrets: RegretTotals


class ConductorPort(Protocol):
    """Calls never block. `submit` raises RequestError when the request cannot be taken at all; what happens later comes
    back through GatewayPort."""

    def models(self) -> dict[str, ServedModel]: ...

    def submit(self, request: RoutedRequest, gateway: GatewayPort) -> None: ...

    def finish(self, request_id: str, reason: str) -> None:
        """The gateway reached the terminal state: release whatever the cluster still holds. Idempotent."""

    def cluster(self) -> ClusterView: ...

    def explain(self, request_id: str) -> list[Explanation]:
        """Why each recent attempt of a request was placed or rejected as it was, the oldest first."""

    def recent_decisions(self, count: int) -> list[tuple[int, Explanation]]:
        """The latest ones with their ages in microseconds, the newest first."""


class PoolPort(Protocol):
    """Who starts and ends instances."""

    def scale(self, pool: str, instances: int) -> AsyncIterator[InstanceChange | ScaleDone]:
        """What happens until `pool` has so many instances; ScaleDone is the last. Raises RequestError when it cannot be
        done, or when nobody is there to do it."""


class GatewayPort(Protocol):
    """Called on the gateway's event loop."""

    def on_placed(self, request_id: str, attempt: int, placement: Placement) -> None: ...

    def on_attempt_failed(self, request_id: str, attempt: int, reason: str) -> None:
        """This attempt is over (instance lost, refused by D, transfer failed); the gateway plans a new one."""

    def on_rejected(self, request_id: str, attempt: int, error: RequestError) -> None: ...

    def on_handoff_complete(self, request_id: str, attempt: int) -> None: ...


class ReceivedTokens(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One TokenDelta after decoding, as TokenLink hands it to the gateway that owns the request."""

    ref: InstanceRef
    instance: str
    request_id: str
    attempt: int
    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish: str
    """"" while running, else stop, length, cancelled, error."""
    error: str
    tokens_cached: int
    from_prefill: bool
    queue_us: int
    compute_us: int
    scores: PromptScores | None = None
