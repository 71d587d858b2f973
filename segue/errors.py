"""The error tree and the one status table for gRPC and HTTP.

SegueError
├── RequestError            the caller's fault or the cluster's state; safe to show to the caller
│   ├── InvalidField        names the field and the limit
│   ├── BodyTooLarge
│   ├── UnknownModel
│   ├── DuplicateRequest
│   ├── Unauthenticated / PermissionDenied
│   ├── Overloaded          carries retry_after_ms, reason, resource
│   ├── Unavailable         no compatible instance, draining
│   ├── DeadlineExceeded
│   └── Cancelled
├── ConfigError             the operator's fault, names the option
└── InternalError           our bug; the caller sees only an id that the log has
"""

from __future__ import annotations


class SegueError(Exception):
    """Root of every error Segue raises on purpose."""


class RequestError(SegueError):
    """An error that ends one request. Subclasses set the class attributes; nothing else is disturbed."""

    grpc_status = "UNKNOWN"
    http_status = 500
    openai_type = "invalid_request_error"
    code = "invalid_request"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidField(RequestError):
    """A malformed or out-of-range field, named together with its limit."""

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    code = "invalid_value"

    def __init__(self, field: str, message: str, *, code: str | None = None) -> None:
        super().__init__(f"{field}: {message}", field=field)
        if code is not None:
            self.code = code


class BodyTooLarge(RequestError):
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 413
    code = "body_too_large"


class UnknownModel(RequestError):
    grpc_status = "NOT_FOUND"
    http_status = 404
    code = "model_not_found"


class DuplicateRequest(RequestError):
    grpc_status = "ALREADY_EXISTS"
    http_status = 409
    code = "duplicate_request_id"


class Unauthenticated(RequestError):
    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    openai_type = "authentication_error"
    code = "invalid_api_key"


class PermissionDenied(RequestError):
    grpc_status = "PERMISSION_DENIED"
    http_status = 403
    openai_type = "permission_error"
    code = "permission_denied"


class Overloaded(RequestError):
    """A rejection by admission: the reason, the resource that is short, and when to try again."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    openai_type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, resource: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.resource = resource
        self.retry_after_ms = retry_after_ms


class Unavailable(RequestError):
    grpc_status = "UNAVAILABLE"
    http_status = 503
    openai_type = "server_error"
    code = "unavailable"


class DeadlineExceeded(RequestError):
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 408
    openai_type = "server_error"
    code = "deadline_exceeded"


class Cancelled(RequestError):
    grpc_status = "CANCELLED"
    http_status = 499
    code = "cancelled"


class ConfigError(SegueError):
    """A bad option, file or environment, found at start."""


class InternalError(SegueError):
    """A broken invariant: our bug, never the peer's or the user's."""

    grpc_status = "INTERNAL"
    http_status = 500


REQUEST_ERRORS: dict[str, type[RequestError]] = {
    cls.code: cls
    for cls in (
        InvalidField,
        BodyTooLarge,
        UnknownModel,
        DuplicateRequest,
        Unauthenticated,
        PermissionDenied,
        Overloaded,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
    )
}
