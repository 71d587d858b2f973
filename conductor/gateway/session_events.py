"""What happens to a session, what it decides, and what it has to say at its end."""

from __future__ import annotations

import msgspec

from conductor.ports import Placement, ReceivedTokens
from segue.errors import RequestError, SegueError
from segue.plan import PromptScores, TokenLogprobs
from segue.sampling_params import SamplingParams


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One checked request. `prompt_ids` is little-endian u32; `deadline_us` 0 is none."""

    request_id: str
    model: str
    prompt_ids: bytes
    tokens_prompt: int
    sampling: SamplingParams
    arrived_us: int
    tokenized_us: int = 0
    """When tokenising was done, in microseconds since the arrival."""
    deadline_us: int = 0
    tenant: str = ""
    priority: int = 0
    prompt_only: bool = False
    """The client wants to hear of the prompt alone: the first sampled token ends the request, unseen and uncounted."""


class Submitted(msgspec.Struct, frozen=True):
    attempt: int


class Placed(msgspec.Struct, frozen=True):
    attempt: int
    placement: Placement


class AttemptFailed(msgspec.Struct, frozen=True):
    attempt: int
    reason: str


class Rejected(msgspec.Struct, frozen=True):
    attempt: int
    error: RequestError


class HandoffComplete(msgspec.Struct, frozen=True):
    attempt: int


class Stopped(msgspec.Struct, frozen=True):
    """Someone outside ends the request: the client, an operator, the gateway's own shutdown or fault."""

    error: SegueError


Event = Submitted | Placed | AttemptFailed | Rejected | HandoffComplete | Stopped | ReceivedTokens


class Emit(msgspec.Struct, frozen=True, gc=False):
    """New tokens and the text that became certain; `logprobs`, when asked for, has one entry for each token. `scores`,
    when asked for, come once, before the first token: all prompt tokens but the first."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    scores: PromptScores | None = None


class Replan(msgspec.Struct, frozen=True):
    """Submit attempt `attempt` with prompt and tokens so far, `delay_us` from now."""

    attempt: int
    delay_us: int
    reason: str


class End(msgspec.Struct, frozen=True):
    """The one terminal state. `reason`: stop, length, cancelled, error; `error` is set with the last two."""

    reason: str
    error: Exception | None = None


Decision = Emit | Replan | End


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and times of a request. Times are microseconds since its arrival; 0 where a stage did not happen."""

    tokens_prompt: int
    tokens_generated: int
    tokens_cached: int
    tokenized_us: int
    routed_us: int
    prefill_started_us: int
    first_token_us: int
    handoff_complete_us: int
    finished_us: int
    queue_us: int
    prefill_instance: str
    decode_instance: str
    attempts: int
