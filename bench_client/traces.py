"""Published traces as planned requests. A wrong row is an error that names the file, the line and the field.

| file | fields |
| --- | --- |
| Mooncake JSONL | `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token blocks (FAST'25 release) |
| Qwen-Bailian JSONL | the same with `chat_id`, `timestamp` in seconds and blocks of 16 tokens |
| lengths CSV | `arrival_ms`, `input_length`, `output_length` |
| Azure CSV, 2023 and 2024 | `TIMESTAMP` (date and time), `ContextTokens`, `GeneratedTokens` |
| BurstGPT CSV | `Timestamp` (seconds), `Request tokens`, `Response tokens` |
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from bench_client.lengths import TOKENS_MAX
from segue.errors import ConfigError

Row = dict[str, Any]

ARRIVAL_US_MAX = 366 * 86_400 * 1_000_000


class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """`hash_ids` name blocks of `Trace.block_tokens` tokens, the last one perhaps partial."""

    arrival_us: int
    tokens_input: int
    tokens_output: int
    hash_ids: tuple[int, ...] = ()


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    kind: str
    rows: list[TraceRow]
    block_tokens: int = 0
    """Tokens of one hashed block; 0: the trace has lengths only."""


class TraceError(ConfigError):
    """A trace that cannot be read; the message is `file:line: field: what`."""


class _Columns(msgspec.Struct, frozen=True):
    """Where a kind of trace keeps what."""

    kind: str
    arrival: str
    tokens_input: str
    tokens_output: str
    arrival_us: Callable[[Any], int]
    hash_ids: str = ""
    block_tokens: int = 0


def read_trace(path: Path) -> Trace:
    """Rows in file order, arrivals counted from the first. Raises TraceError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error
    if path.suffix == ".jsonl":
        numbered = list(_json_rows(path, text))
        columns = _json_columns(numbered[0][1] if numbered else {})
    elif path.suffix == ".csv":
        columns, numbered = _csv_rows(path, text)
    else:
        raise TraceError(f"{path}: must end in .jsonl or .csv")
    if not numbered:
        raise TraceError(f"{path}: holds no requests")
    rows = [_row(f"{path}:{line}", columns, row) for line, row in numbered]
    return Trace(
        source=path.name, kind=columns.kind, rows=_from_first(path, numbered, rows), block_tokens=columns.block_tokens
    )


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Row]]:
    for line, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}:{line}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{path}:{line}: must be a JSON object")
        yield line, row


def _csv_rows(path: Path, text: str) -> tuple[_Columns, list[tuple[int, Row]]]:
    reader = csv.DictReader(text.splitlines())
    header = reader.fieldnames or []
    columns = next((known for known in CSV_KINDS if {*_required(known)} <= {*header}), None)
    if columns is None:
        known = " or ".join(",".join(_required(kind)) for kind in CSV_KINDS)
        raise TraceError(f"{path}:1: unknown header {','.join(header)[:200]!r}; known: {known}")
    try:
        return columns, [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise TraceError(f"{path}:{reader.line_num}: {error}") from error


def _required(columns: _Columns) -> Iterable[str]:
    return columns.arrival, columns.tokens_input, columns.tokens_output


def _row(where: str, columns: _Columns, row: Row) -> TraceRow:
    tokens_input = _tokens(where, columns.tokens_input, row)
    return TraceRow(
        arrival_us=_arrival(where, columns, row),
        tokens_input=tokens_input,
        tokens_output=_tokens(where, columns.tokens_output, row),
        hash_ids=_hash_ids(where, columns, row, tokens_input) if columns.hash_ids else (),
    )


def _arrival(where: str, columns: _Columns, row: Row) -> int:
    value = _present(where, columns.arrival, row)
    try:
        arrival_us = columns.arrival_us(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{where}: {columns.arrival}: {value!r} is no time") from error
    return arrival_us


def _tokens(where: str, name: str, row: Row) -> int:
    value = _present(where, name, row)
    try:
        tokens = int(value) if isinstance(value, str) else value
    except ValueError:
        tokens = value
    if not isinstance(tokens, int) or isinstance(tokens, bool):
        raise TraceError(f"{where}: {name}: {value!r} is not a whole number")
    if not 1 <= tokens <= TOKENS_MAX:
        raise TraceError(f"{where}: {name}: {tokens} is not in 1 .. {TOKENS_MAX}")
    return tokens


def _hash_ids(where: str, columns: _Columns, row: Row, tokens_input: int) -> tuple[int, ...]:
    value = _present(where, columns.hash_ids, row)
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        raise TraceError(f"{where}: {columns.hash_ids}: must be a list of whole numbers")
    blocks = -(-tokens_input // columns.block_tokens)
    if len(value) != blocks:
        raise TraceError(
            f"{where}: {columns.hash_ids}: has {len(value)} ids, but {tokens_input} tokens are {blocks} blocks of "
            f"{columns.block_tokens}"
        )
    return tuple(value)


def _present(where: str, name: str, row: Row) -> Any:
    value = row.get(name)
    if value is None or value == "":
        raise TraceError(f"{where}: {name}: is missing")
    return value


def _from_first(path: Path, numbered: list[tuple[int, Row]], rows: list[TraceRow]) -> list[TraceRow]:
    """Arrivals must not go back: a replay sends in file order."""
    start_us, last_us = rows[0].arrival_us, rows[0].arrival_us
    for (line, _), row in zip(numbered, rows, strict=True):
        if row.arrival_us < last_us:
            raise TraceError(f"{path}:{line}: arrives before the row above; sort the trace by time")
        if row.arrival_us - start_us > ARRIVAL_US_MAX:
            raise TraceError(f"{path}:{line}: arrives more than a year after the first row")
        last_us = row.arrival_us
    return [msgspec.structs.replace(row, arrival_us=row.arrival_us - start_us) for row in rows]


def _from_ms(value: Any) -> int:
    return round(float(value) * 1e3)


def _from_s(value: Any) -> int:
    return round(float(value) * 1e6)


def _from_date(value: Any) -> int:
    """Azure writes seven digits of a second, more than datetime takes."""
    whole, _, fraction = str(value).partition(".")
    digits = fraction.partition("+")[0][:7]
    moment = datetime.fromisoformat(whole)
    return (moment - datetime(1970, 1, 1)).days * 86_400_000_000 + _of_day_us(moment) + int(digits.ljust(6, "0")[:6])


def _of_day_us(moment: datetime) -> int:
    return ((moment.hour * 60 + moment.minute) * 60 + moment.second) * 1_000_000


CSV_KINDS = (
    _Columns("lengths CSV", "arrival_ms", "input_length", "output_length", _from_ms),
    _Columns("Azure CSV", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _from_date),
    _Columns("BurstGPT CSV", "Timestamp", "Request tokens", "Response tokens", _from_s),
)


def _json_columns(first: Row) -> _Columns:
    if "chat_id" in first:
        return _Columns("Bailian JSONL", "timestamp", "input_length", "output_length", _from_s, "hash_ids", 16)
    if first and "hash_ids" not in first:
        return _Columns("lengths JSONL", "timestamp", "input_length", "output_length", _from_ms)
    return _Columns("Mooncake JSONL", "timestamp", "input_length", "output_length", _from_ms, "hash_ids", 512)
