"""Errors as gRPC sees them: status, message, and trailing metadata."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeAlias

import grpc

from conductor.gateway.metrics import RequestMetrics
from segue.errors import Overloaded, RequestError

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


async def abort(context: Context, error: RequestError) -> NoReturn:
    """End the call with the error's status; `code` and `field` are there for programs, `retry-after-ms` for retries."""
    metadata = [("code", error.code)]
    if error.field is not None:
        metadata.append(("field", error.field))
    if isinstance(error, Overloaded):
        metadata += [("retry-after-ms", str(error.retry_after_ms)), ("resource", error.resource)]
    await _end(context, grpc.StatusCode[error.grpc_status], error.message, tuple(metadata))


async def _end(
    context: Context, status: grpc.StatusCode, message: str, metadata: tuple[tuple[str, str], ...] = ()
) -> NoReturn:
    """A status cannot be sent to a client that has just left: for grpc that is an error, for us a cancelled call."""
    try:
        await context.abort(status, message, metadata)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError("the client is gone") from error
    raise AssertionError("abort returns never")


@asynccontextmanager
async def errors_to_status(context: Context, metrics: RequestMetrics) -> AsyncIterator[None]:
    """RequestErrors become their status, everything else INTERNAL with an id that the log has."""
    try:
        yield
    except (grpc.aio.AbortError, asyncio.CancelledError):
        raise
    except RequestError as error:
        metrics.answered_with(error)
        await abort(context, error)
    except Exception as error:
        error_id = uuid.uuid4().hex
        log.exception("internal error %s", error_id)
        metrics.answered_with(error)
        await _end(context, grpc.StatusCode.INTERNAL, f"internal error {error_id}; the server's log has the details")
