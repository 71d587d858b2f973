"""Published traces are read as they are; a wrong row is told with file, line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench_client.replay import Replay, apply_replay
from bench_client.traces import Trace, TraceError, TraceRow, read_trace
from segue.errors import ConfigError

MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}'


def test_a_mooncake_trace(data: Path) -> None:
    trace = read_trace(data / "conversation_12.jsonl")
    assert (trace.kind, trace.block_tokens, len(trace.rows)) == ("Mooncake JSONL", 512, 12)
    assert trace.rows[0] == TraceRow(arrival_us=0, tokens_input=6758, tokens_output=500, hash_ids=tuple(range(14)))
    assert all(row.hash_ids[0] == 0 for row in trace.rows)


def test_a_lengths_csv_counts_from_its_first_arrival(data: Path) -> None:
    trace = read_trace(data / "sharegpt_8_lengths.csv")
    assert trace.rows[:2] == [
        TraceRow(arrival_us=0, tokens_input=2358, tokens_output=531),
        TraceRow(arrival_us=301_012, tokens_input=1034, tokens_output=769),
    ]


def test_an_azure_csv_has_dates(data: Path) -> None:
    trace = read_trace(data / "azure_2023_5.csv")
    assert trace.rows[1] == TraceRow(arrival_us=4_314_579, tokens_input=396, tokens_output=109)


def test_a_burstgpt_csv(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,230,1317,Conversation log\n"
    )
    assert read_trace(path).rows[1] == TraceRow(arrival_us=40_000_000, tokens_input=1087, tokens_output=230)


def test_a_bailian_trace_has_blocks_of_16(tmp_path: Path) -> None:
    path = tmp_path / "qwen.jsonl"
    path.write_text(
        '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 20, "output_length": 3, "type": "text",'
        ' "turn": 1, "hash_ids": [7, 8]}\n'
    )
    assert read_trace(path).block_tokens == 16


WRONG = {
    "2: input_length: is missing": MOONCAKE + '\n{"timestamp": 0, "output_length": 5, "hash_ids": [0]}',
    "1: output_length: 0 is not in 1": MOONCAKE.replace('"output_length": 5', '"output_length": 0'),
    "1: output_length: 'x' is not": MOONCAKE.replace('"output_length": 5', '"output_length": "x"'),
    "1: input_length: True is not": MOONCAKE.replace("600", "true"),
    "1: input_length: 1.5 is not": MOONCAKE.replace("600", "1.5"),
    "1: hash_ids: has 2 ids, but 6000": MOONCAKE.replace("600", "6000"),
    "1: hash_ids: must be a list": MOONCAKE.replace("[0, 1]", '["a", 1]'),
    "1: timestamp: 'soon' is no time": MOONCAKE.replace('"timestamp": 0', '"timestamp": "soon"'),
    "1: timestamp: nan is no time": MOONCAKE.replace('"timestamp": 0', '"timestamp": NaN'),
    "3: arrives before": f"{MOONCAKE.replace('0,', '9,', 1)}\n\n{MOONCAKE}",
    "1: not JSON": "{",
    "1: must be a JSON object": "[1]",
    ": holds no requests": "\n",
}


@pytest.mark.parametrize("told", WRONG)
def test_a_wrong_row_is_told_with_file_line_and_field(told: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(WRONG[told])
    with pytest.raises(TraceError) as refusal:
        read_trace(path)
    assert str(refusal.value).startswith(f"{path}") and told in str(refusal.value)


def test_a_csv_with_an_unknown_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("when,in,out\n1,2,3\n")
    with pytest.raises(TraceError, match=r"trace.csv:1: unknown header 'when,in,out'; known: arrival_ms,"):
        read_trace(path)


def test_a_csv_row_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_ms,input_length,output_length\n1,2,3\n2,many,3\n")
    with pytest.raises(TraceError, match=r"trace.csv:3: input_length: 'many'"):
        read_trace(path)


def trace_of(*arrivals_s: int, tokens: int = 1000) -> Trace:
    blocks = tuple(range(-(-tokens // 512)))
    rows = [
        TraceRow(arrival_us=at * 10**6, tokens_input=tokens, tokens_output=100, hash_ids=blocks) for at in arrivals_s
    ]
    return Trace(source="t", kind="k", rows=rows, block_tokens=512)


def arrivals_s(trace: Trace) -> list[float]:
    return [row.arrival_us / 1e6 for row in trace.rows]


def test_a_cut_starts_at_zero_and_speed_divides_time() -> None:
    trace = trace_of(0, 10, 20, 30, 40)
    assert arrivals_s(apply_replay(trace, Replay(cut="1:4"))) == [0, 10, 20]
    assert arrivals_s(apply_replay(trace, Replay(cut="15:35s", speed=2))) == [0, 5]
    assert arrivals_s(apply_replay(trace, Replay(cut=":2"))) == [0, 10]


def test_bursts_are_kept_unless_they_are_to_be_spread() -> None:
    trace = trace_of(0, 0, 0, 3, 3, 9)
    assert arrivals_s(apply_replay(trace, Replay())) == [0, 0, 0, 3, 3, 9]
    assert arrivals_s(apply_replay(trace, Replay(spread=True))) == [0, 1, 2, 3, 6, 9]


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 1000, 6758])
@pytest.mark.parametrize("shrink", [2, 8, 512])
def test_a_shrunk_prompt_keeps_the_number_of_its_blocks(tokens: int, shrink: int) -> None:
    shrunk = apply_replay(trace_of(0, tokens=tokens), Replay(shrink=shrink))
    (row,) = shrunk.rows
    assert -(-row.tokens_input // shrunk.block_tokens) == len(row.hash_ids)


@pytest.mark.parametrize(
    ("replay", "named"),
    [
        (Replay(cut="5"), "--slice"),
        (Replay(cut="7:9"), "--slice"),
        (Replay(cut="a:b"), "--slice"),
        (Replay(speed=0), "--speed"),
        (Replay(speed=float("nan")), "--speed"),
        (Replay(shrink=0), "--shrink"),
        (Replay(shrink=7), "--shrink"),
    ],
)
def test_a_replay_that_makes_no_sense_is_refused_by_name(replay: Replay, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        apply_replay(trace_of(0, 1), replay)
