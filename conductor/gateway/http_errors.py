"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}} and a status."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from conductor.gateway.metrics import RequestMetrics
from segue.errors import Overloaded, RequestError

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]

JSON_TYPE = "application/json"


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type=JSON_TYPE)


def error_object(error: Exception, error_id: str = "") -> dict[str, Any]:
    """What the client may know: everything of a RequestError, only the id of anything else."""
    if isinstance(error, RequestError):
        body = {"message": error.message, "type": error.openai_type, "param": error.field, "code": error.code}
        if isinstance(error, Overloaded):
            body["resource"] = error.resource
        return {"error": body}
    message = f"internal error {error_id}; the server's log has the details"
    return {"error": {"message": message, "type": "server_error", "param": None, "code": "internal_error"}}


def error_response(error: Exception, error_id: str = "") -> Response:
    status = error.http_status if isinstance(error, RequestError) else 500
    response = json_response(error_object(error, error_id), status)
    if isinstance(error, Overloaded):
        response.headers["Retry-After"] = str(max(math.ceil(error.retry_after_ms / 1000), 1))
        response.headers["retry-after-ms"] = str(error.retry_after_ms)
    return response


def log_internal(error: Exception) -> str:
    """The id under which the log has the error; "" for errors that are the caller's."""
    if isinstance(error, RequestError):
        return ""
    error_id = uuid.uuid4().hex
    log.error("internal error %s", error_id, exc_info=error)
    return error_id


def guarded(endpoint: Endpoint, metrics: RequestMetrics) -> Endpoint:
    """Turn what `endpoint` raises into an answer."""

    async def handle(request: Request) -> Response:
        try:
            return await endpoint(request)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            metrics.answered_with(error)
            return error_response(error, log_internal(error))

    return handle


def install_routing_errors(app: FastAPI) -> None:
    """Unknown paths and methods get error objects too."""

    @app.exception_handler(HTTPException)
    async def routing_error(request: Request, error: HTTPException) -> Response:
        code = "method_not_allowed" if error.status_code == 405 else "unknown_url"
        message = f"{request.method} {request.url.path}: {error.detail}"
        if allowed := (error.headers or {}).get("Allow"):
            message += f"; it takes {allowed}"
        body = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        return Response(
            msgspec.json.encode({"error": body}),
            status_code=error.status_code,
            media_type=JSON_TYPE,
            headers=dict(error.headers or {}),
        )
