from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScaleRequest(_message.Message):
    __slots__ = ("pool", "instances")
    POOL_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    pool: str
    instances: int
    def __init__(self, pool: _Optional[str] = ..., instances: _Optional[int] = ...) -> None: ...

class InstanceChange(_message.Message):
    __slots__ = ("name", "state", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ScaleDone(_message.Message):
    __slots__ = ("instances",)
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    instances: int
    def __init__(self, instances: _Optional[int] = ...) -> None: ...

class ScaleEvent(_message.Message):
    __slots__ = ("change", "done")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    change: InstanceChange
    done: ScaleDone
    def __init__(self, change: _Optional[_Union[InstanceChange, _Mapping]] = ..., done: _Optional[_Union[ScaleDone, _Mapping]] = ...) -> None: ...

class ScaleRefused(_message.Message):
    __slots__ = ("field", "reason")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    field: str
    reason: str
    def __init__(self, field: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ScaleReport(_message.Message):
    __slots__ = ("op", "change", "done", "refused")
    OP_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    op: int
    change: InstanceChange
    done: ScaleDone
    refused: ScaleRefused
    def __init__(self, op: _Optional[int] = ..., change: _Optional[_Union[InstanceChange, _Mapping]] = ..., done: _Optional[_Union[ScaleDone, _Mapping]] = ..., refused: _Optional[_Union[ScaleRefused, _Mapping]] = ...) -> None: ...

class ProcessEnded(_message.Message):
    __slots__ = ("uuid", "pid")
    UUID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    pid: int
    def __init__(self, uuid: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class PoolMessage(_message.Message):
    __slots__ = ("report", "ended")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    report: ScaleReport
    ended: ProcessEnded
    def __init__(self, report: _Optional[_Union[ScaleReport, _Mapping]] = ..., ended: _Optional[_Union[ProcessEnded, _Mapping]] = ...) -> None: ...

class PoolCommand(_message.Message):
    __slots__ = ("op", "scale")
    OP_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    op: int
    scale: ScaleRequest
    def __init__(self, op: _Optional[int] = ..., scale: _Optional[_Union[ScaleRequest, _Mapping]] = ...) -> None: ...
