from segue_proto.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OutcomeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_KIND_UNSPECIFIED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_GRANTED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_PREFILL_STARTED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_PREFILL_DONE: _ClassVar[OutcomeKind]
    OUTCOME_KIND_HANDOFF_COMPLETE: _ClassVar[OutcomeKind]
    OUTCOME_KIND_EMPTY: _ClassVar[OutcomeKind]
    OUTCOME_KIND_DONE_AT_P: _ClassVar[OutcomeKind]
    OUTCOME_KIND_FINISHED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_REFUSED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_FAILED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_CANCELLED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_PREEMPTED: _ClassVar[OutcomeKind]
OUTCOME_KIND_UNSPECIFIED: OutcomeKind
OUTCOME_KIND_GRANTED: OutcomeKind
OUTCOME_KIND_PREFILL_STARTED: OutcomeKind
OUTCOME_KIND_PREFILL_DONE: OutcomeKind
OUTCOME_KIND_HANDOFF_COMPLETE: OutcomeKind
OUTCOME_KIND_EMPTY: OutcomeKind
OUTCOME_KIND_DONE_AT_P: OutcomeKind
OUTCOME_KIND_FINISHED: OutcomeKind
OUTCOME_KIND_REFUSED: OutcomeKind
OUTCOME_KIND_FAILED: OutcomeKind
OUTCOME_KIND_CANCELLED: OutcomeKind
OUTCOME_KIND_PREEMPTED: OutcomeKind

class InstanceRef(_message.Message):
    __slots__ = ("uuid", "incarnation")
    UUID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    incarnation: int
    def __init__(self, uuid: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    def __init__(self, manifest: _Optional[bytes] = ...) -> None: ...

class ModelCardAsset(_message.Message):
    __slots__ = ("digest", "card")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    digest: str
    card: bytes
    def __init__(self, digest: _Optional[str] = ..., card: _Optional[bytes] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("request_id", "attempt", "kind", "reason", "tokens_cached", "tokens_generated")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    kind: OutcomeKind
    reason: str
    tokens_cached: int
    tokens_generated: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., kind: _Optional[_Union[OutcomeKind, str]] = ..., reason: _Optional[str] = ..., tokens_cached: _Optional[int] = ..., tokens_generated: _Optional[int] = ...) -> None: ...

class WorkerHeartbeat(_message.Message):
    __slots__ = ("steps", "draining")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    steps: int
    draining: bool
    def __init__(self, steps: _Optional[int] = ..., draining: bool = ...) -> None: ...

class AttemptKey(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class LiveAttempts(_message.Message):
    __slots__ = ("attempts",)
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptKey]
    def __init__(self, attempts: _Optional[_Iterable[_Union[AttemptKey, _Mapping]]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("register", "card", "outcome", "heartbeat", "live")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    register: Register
    card: ModelCardAsset
    outcome: Outcome
    heartbeat: WorkerHeartbeat
    live: LiveAttempts
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., card: _Optional[_Union[ModelCardAsset, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., heartbeat: _Optional[_Union[WorkerHeartbeat, _Mapping]] = ..., live: _Optional[_Union[LiveAttempts, _Mapping]] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("need_card", "heartbeat_ms", "conductor")
    NEED_CARD_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    CONDUCTOR_FIELD_NUMBER: _ClassVar[int]
    need_card: bool
    heartbeat_ms: int
    conductor: str
    def __init__(self, need_card: bool = ..., heartbeat_ms: _Optional[int] = ..., conductor: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("ref", "name", "control_address")
    REF_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ref: InstanceRef
    name: str
    control_address: str
    def __init__(self, ref: _Optional[_Union[InstanceRef, _Mapping]] = ..., name: _Optional[str] = ..., control_address: _Optional[str] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("request_id", "attempt", "gateway", "token_ids", "tokens_prompt", "sampling", "prefill", "decode", "hash_root", "deadline_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    HASH_ROOT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    gateway: str
    token_ids: bytes
    tokens_prompt: int
    sampling: _inference_pb2.SamplingParams
    prefill: Peer
    decode: Peer
    hash_root: bytes
    deadline_ms: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., gateway: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., tokens_prompt: _Optional[int] = ..., sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., prefill: _Optional[_Union[Peer, _Mapping]] = ..., decode: _Optional[_Union[Peer, _Mapping]] = ..., hash_root: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class CancelAttempt(_message.Message):
    __slots__ = ("request_id", "attempt", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ResyncEvents(_message.Message):
    __slots__ = ("sequence_seen",)
    SEQUENCE_SEEN_FIELD_NUMBER: _ClassVar[int]
    sequence_seen: int
    def __init__(self, sequence_seen: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OutcomesTaken(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: int
    def __init__(self, outcomes: _Optional[int] = ...) -> None: ...

class ConductorMessage(_message.Message):
    __slots__ = ("registered", "refused", "assign", "cancel", "resync", "drain", "taken")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    registered: Registered
    refused: Refused
    assign: Assign
    cancel: CancelAttempt
    resync: ResyncEvents
    drain: Drain
    taken: OutcomesTaken
    def __init__(self, registered: _Optional[_Union[Registered, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., assign: _Optional[_Union[Assign, _Mapping]] = ..., cancel: _Optional[_Union[CancelAttempt, _Mapping]] = ..., resync: _Optional[_Union[ResyncEvents, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., taken: _Optional[_Union[OutcomesTaken, _Mapping]] = ...) -> None: ...

class PromptScores(_message.Message):
    __slots__ = ("position", "alternatives", "logprobs", "ranks", "top_ids", "top_logprobs")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    position: int
    alternatives: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, position: _Optional[int] = ..., alternatives: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("request_id", "attempt", "position", "token_ids", "logprobs", "finish", "error", "tokens_cached", "from_prefill", "queue_us", "compute_us", "scores")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    FROM_PREFILL_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    finish: _inference_pb2.FinishReason
    error: str
    tokens_cached: int
    from_prefill: bool
    queue_us: int
    compute_us: int
    scores: PromptScores
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., error: _Optional[str] = ..., tokens_cached: _Optional[int] = ..., from_prefill: bool = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., scores: _Optional[_Union[PromptScores, _Mapping]] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("ref", "name", "deltas")
    REF_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    ref: InstanceRef
    name: str
    deltas: _containers.RepeatedCompositeFieldContainer[TokenDelta]
    def __init__(self, ref: _Optional[_Union[InstanceRef, _Mapping]] = ..., name: _Optional[str] = ..., deltas: _Optional[_Iterable[_Union[TokenDelta, _Mapping]]] = ...) -> None: ...

class TokenAck(_message.Message):
    __slots__ = ("batches", "cancels")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    batches: int
    cancels: _containers.RepeatedCompositeFieldContainer[CancelAttempt]
    def __init__(self, batches: _Optional[int] = ..., cancels: _Optional[_Iterable[_Union[CancelAttempt, _Mapping]]] = ...) -> None: ...
