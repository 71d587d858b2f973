"""Request bodies: bounded, JSON, and records whose errors name the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from segue import limits
from segue.errors import BodyTooLarge, Cancelled, InvalidField

T = TypeVar("T")

JSON_NAMES = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}

MISSING_FIELD = re.compile(r"^Object missing required field `(?P<name>[^`]+)`")
PATH_OF_ERROR = re.compile(r"^(?P<what>.*?) - at .*?`\$\.?(?P<path>[^`]*)`$", re.DOTALL)


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object of a request's body. Raises BodyTooLarge before reading more than the limit, Cancelled when the
    client leaves before the body's end."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit():
        _check_size(int(declared))
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            _check_size(len(body))
    except ClientDisconnect as error:
        raise Cancelled("the client is gone") from error
    return decode_object(bytes(body))


def decode_object(body: bytes) -> dict[str, Any]:
    if not body:
        raise InvalidField("body", "is empty; a JSON object is expected")
    try:
        decoded = msgspec.json.decode(body)
    except RecursionError as error:
        raise InvalidField("body", "is nested too deeply") from error
    except msgspec.MsgspecError as error:
        raise _malformed(body, str(error)) from error
    if not isinstance(decoded, dict):
        raise InvalidField("body", f"is a JSON {JSON_NAMES[type(decoded)]}, must be an object")
    return decoded


def convert(decoded: dict[str, Any], kind: type[T]) -> T:
    """Raise InvalidField that names the path of the wrong field."""
    try:
        return msgspec.convert(decoded, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error


def _invalid(message: str) -> InvalidField:
    """From msgspec's "<what> - at `$.<path>`"."""
    match = PATH_OF_ERROR.match(message)
    what, path = (message, "") if match is None else (match["what"], match["path"])
    missing = MISSING_FIELD.match(what)
    if missing is not None:
        return InvalidField(f"{path}.{missing['name']}" if path else missing["name"], "is required")
    return InvalidField(path or "body", what.replace("`", ""))


def _check_size(size: int) -> None:
    if size > limits.BODY_BYTES_MAX:
        raise BodyTooLarge(f"the body has at least {size} bytes, at most {limits.BODY_BYTES_MAX} are allowed")


def _malformed(body: bytes, message: str) -> InvalidField:
    """NaN and Infinity are no JSON, but Python's encoders write them: then name the field."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return InvalidField("body", f"is not valid UTF-8 at byte {error.start}")
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError):
        return InvalidField("body", f"is not valid JSON: {message}")
    for path, value in _leaves(decoded, ""):
        if isinstance(value, float) and not math.isfinite(value):
            return InvalidField(path, f"is {value}, must be a finite number")
    return InvalidField("body", f"is not valid JSON: {message}")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value
