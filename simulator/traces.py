"""Readers of published request traces. A bad row is an error that names file, line and field."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from segue.errors import SegueError
from segue.limits import PROMPT_TOKENS_MAX
from simulator.prompt_tokens import PRIVATE_IDS
from simulator.workload import Workload, WorkloadRequest

LINE_BYTES_MAX = 4 * 1024 * 1024
"""A million-token prompt has 65,536 ids of 16 tokens: well under a megabyte."""

OUTPUT_TOKENS_MAX = PROMPT_TOKENS_MAX

ARRIVAL_US_MAX = 10 * 365 * 86_400 * 1_000_000
"""Ten years: what is later is another unit, or not a time."""

Row = tuple[int, dict[str, Any]]
"""(line number, field -> value)."""


class TraceError(SegueError):
    """A trace that cannot be used; the message names file, line and field."""


def read_trace(path: Path, kind: str = "auto") -> Workload:
    """Requests of one file, in order of arrival, from time 0 on. `kind`: a name of READERS, or auto (by content).

    Raises TraceError for a file that cannot be read, a row that cannot be used, and a file without requests.
    """
    chosen = detect(path) if kind == "auto" else kind
    if chosen not in READERS:
        raise TraceError(f"unknown trace format {chosen!r}; known: auto, {', '.join(sorted(READERS))}")
    reader, span_tokens = READERS[chosen]
    try:
        requests = list(_checked(path, reader(path)))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    if not requests:
        raise TraceError(f"{path}: no requests")
    return Workload(name=path.stem, requests=requests, span_tokens=span_tokens)


def detect(path: Path) -> str:
    """The format of a file, by its first line."""
    try:
        with path.open("rb") as file:
            first = file.readline(LINE_BYTES_MAX).decode("utf-8", errors="replace")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    if first.lstrip().startswith("{"):
        return "qwen-bailian" if '"chat_id"' in first else "mooncake"
    header = first.strip().lower()
    signs = {"contexttokens": "azure", "request tokens": "burstgpt", "arrival_ms": "lengths"}
    for sign, kind in signs.items():
        if sign in header:
            return kind
    raise TraceError(f"{path}, line 1: neither JSON nor a header that is known; name the format")


# -- one reader for each format: (line, request with absolute arrival)

Parsed = Iterator[tuple[int, WorkloadRequest]]


def _mooncake(path: Path) -> Parsed:
    """`timestamp` ms, `input_length`, `output_length`, `hash_ids` of 512-token blocks, the partial tail included."""
    for line, row in _json_rows(path):
        yield line, _hashed(path, line, row, span_tokens=512, unit_us=1_000)


def _qwen_bailian(path: Path) -> Parsed:
    """`timestamp` s, lengths and `hash_ids` of 16-token blocks, `chat_id`."""
    for line, row in _json_rows(path):
        yield line, _hashed(path, line, row, span_tokens=16, unit_us=1_000_000)


def _hashed(path: Path, line: int, row: dict[str, Any], *, span_tokens: int, unit_us: int) -> WorkloadRequest:
    prompt = _count(path, line, row, "input_length", PROMPT_TOKENS_MAX)
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(item) is int and 0 <= item < PRIVATE_IDS for item in ids):
        raise TraceError(f"{path}, line {line}, hash_ids: not a list of whole numbers from 0 to {PRIVATE_IDS - 1}")
    if ids and len(ids) not in (prompt // span_tokens, -(-prompt // span_tokens)):
        message = f"{len(ids)} ids for {prompt} tokens in blocks of {span_tokens}"
        raise TraceError(f"{path}, line {line}, hash_ids: {message}")
    return WorkloadRequest(
        arrival_us=round(_number(path, line, row, "timestamp") * unit_us),
        tokens_prompt=prompt,
        tokens_output=_count(path, line, row, "output_length", OUTPUT_TOKENS_MAX),
        prefix_ids=tuple(ids),
        group=str(row.get("chat_id", "")),
    )


def _azure(path: Path) -> Parsed:
    """`TIMESTAMP` (date and time, 2023 with 7 decimals, 2024 with an offset), `ContextTokens`, `GeneratedTokens`."""
    for line, row in _csv_rows(path):
        yield (
            line,
            WorkloadRequest(
                arrival_us=_instant_us(path, line, row, "TIMESTAMP"),
                tokens_prompt=_count(path, line, row, "ContextTokens", PROMPT_TOKENS_MAX),
                tokens_output=_count(path, line, row, "GeneratedTokens", OUTPUT_TOKENS_MAX, least=0),
            ),
        )


def _burstgpt(path: Path) -> Parsed:
    """`Timestamp` s, `Request tokens`, `Response tokens` (0: the request failed, left out)."""
    for line, row in _csv_rows(path):
        output = _count(path, line, row, "Response tokens", OUTPUT_TOKENS_MAX, least=0)
        prompt = _count(path, line, row, "Request tokens", PROMPT_TOKENS_MAX, least=0)
        arrival_us = round(_number(path, line, row, "Timestamp") * 1_000_000)
        if prompt and output:
            yield line, WorkloadRequest(arrival_us, prompt, output)


def _lengths(path: Path) -> Parsed:
    """`arrival_ms`, `input_length`, `output_length`."""
    for line, row in _csv_rows(path):
        yield (
            line,
            WorkloadRequest(
                arrival_us=round(_number(path, line, row, "arrival_ms") * 1_000),
                tokens_prompt=_count(path, line, row, "input_length", PROMPT_TOKENS_MAX),
                tokens_output=_count(path, line, row, "output_length", OUTPUT_TOKENS_MAX),
            ),
        )


READERS: dict[str, tuple[Callable[[Path], Parsed], int]] = {
    "mooncake": (_mooncake, 512),
    "qwen-bailian": (_qwen_bailian, 16),
    "azure": (_azure, 512),
    "burstgpt": (_burstgpt, 512),
    "lengths": (_lengths, 512),
}
"""Format -> (reader, tokens of one prefix id)."""


# -- rows and fields


def _checked(path: Path, rows: Parsed) -> Iterator[WorkloadRequest]:
    """Arrivals from 0 on, never going back. A request without output generates one token: it was a prefill."""
    origin_us: int | None = None
    previous_us = 0
    for line, request in rows:
        origin_us = request.arrival_us if origin_us is None else origin_us
        arrival_us = request.arrival_us - origin_us
        if arrival_us < previous_us:
            raise TraceError(f"{path}, line {line}, time: {(previous_us - arrival_us) / 1e6:g} s before the line above")
        if arrival_us > ARRIVAL_US_MAX:
            raise TraceError(f"{path}, line {line}, time: {arrival_us / 1e6:g} s after the first request")
        previous_us = arrival_us
        yield WorkloadRequest(
            arrival_us, request.tokens_prompt, max(request.tokens_output, 1), request.prefix_ids, request.group
        )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for line in itertools.count(1):
            raw = file.readline(LINE_BYTES_MAX + 1)
            if not raw:
                return
            if len(raw) > LINE_BYTES_MAX:
                raise TraceError(f"{path}, line {line}: longer than {LINE_BYTES_MAX} bytes")
            try:
                yield line, raw.decode("utf-8-sig" if line == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise TraceError(f"{path}, line {line}: not UTF-8 at byte {error.start}") from error


def _json_rows(path: Path) -> Iterator[Row]:
    for line, text in _lines(path):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}, line {line}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{path}, line {line}: not a JSON object")
        yield line, row


def _csv_rows(path: Path) -> Iterator[Row]:
    header: list[str] | None = None
    for line, text in _lines(path):
        if not text.strip():
            continue
        try:
            cells = next(csv.reader([text]))
        except csv.Error as error:
            raise TraceError(f"{path}, line {line}: {error}") from error
        if header is None:
            header = [cell.strip() for cell in cells]
        else:
            yield line, dict(zip(header, cells, strict=False))


def _number(path: Path, line: int, row: dict[str, Any], field: str) -> float:
    """A finite number, not negative."""
    value = row.get(field)
    if value is None or value == "":
        raise TraceError(f"{path}, line {line}, {field}: missing")
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise TraceError(f"{path}, line {line}, {field}: {str(value)[:40]!r} is not a number from 0 on")
    return number


def _count(path: Path, line: int, row: dict[str, Any], field: str, most: int, least: int = 1) -> int:
    number = _number(path, line, row, field)
    if number != int(number) or not least <= number <= most:
        raise TraceError(f"{path}, line {line}, {field}: {number:g} is not a whole number from {least} to {most}")
    return int(number)


def _instant_us(path: Path, line: int, row: dict[str, Any], field: str) -> int:
    value = row.get(field)
    if not value:
        raise TraceError(f"{path}, line {line}, {field}: missing")
    try:
        instant = datetime.fromisoformat(str(value).strip())
    except ValueError as error:
        raise TraceError(f"{path}, line {line}, {field}: {str(value)[:40]!r} is not a date and time") from error
    return (instant.toordinal() * 86_400 + instant.hour * 3_600 + instant.minute * 60 + instant.second) * 1_000_000 + (
        instant.microsecond
    )
