"""What the front processes tell a worker and what it answers, as plain records.

The wire carries the same content as protobuf (`segue_proto.convert` translates); the cores of the workers, which know
no wire format, see these.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from segue.ids import AttemptRef, InstanceRef
from segue.plan import PromptScores, TokenLogprobs
from segue.sampling_params import SamplingParams


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """The partner of an instance in a hand-off."""

    ref: InstanceRef
    name: str
    control_address: str


class Assign(msgspec.Struct, frozen=True, kw_only=True):
    """One planned attempt. `prefill` unset: the decode instance prefills locally.

    `token_ids` is the prompt followed by the tokens of earlier attempts, as little-endian u32. `deadline_ms` counts
    from receipt; 0 is none.
    """

    request_id: str
    attempt: int
    gateway: str
    token_ids: bytes
    tokens_prompt: int
    sampling: SamplingParams
    prefill: Peer | None = None
    decode: Peer | None = None
    hash_root: bytes = b""
    deadline_ms: int = 0

    @property
    def key(self) -> AttemptRef:
        return AttemptRef(self.request_id, self.attempt)


class CancelAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """`attempt` 0 means every attempt of the request."""

    request_id: str
    attempt: int = 0
    reason: str = ""


class OutcomeKind(StrEnum):
    GRANTED = "granted"
    PREFILL_STARTED = "prefill_started"
    PREFILL_DONE = "prefill_done"
    HANDOFF_COMPLETE = "handoff_complete"
    EMPTY = "empty"
    DONE_AT_P = "done_at_p"
    FINISHED = "finished"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to an attempt, for the Conductor that assigned it."""

    request_id: str
    attempt: int
    kind: OutcomeKind
    reason: str = ""
    tokens_cached: int = 0
    tokens_generated: int = 0


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one attempt; the first one stands at `position`, counted over prompt and generated tokens.

    `finish` is "" while the attempt runs, else stop, length, cancelled or error. `logprobs`, when asked for, has one
    entry for each token; `scores` are of prompt tokens and come before the first token or with it. `queue_us` and
    `compute_us` come with the first token of a prefill.
    """

    request_id: str
    attempt: int
    position: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: str = ""
    error: str = ""
    tokens_cached: int = 0
    from_prefill: bool = False
    queue_us: int = 0
    compute_us: int = 0
    scores: PromptScores | None = None
