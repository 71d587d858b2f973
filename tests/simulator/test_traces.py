"""Trace readers: what each format means, and an error that names file, line and field for every bad row."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.traces import LINE_BYTES_MAX, TraceError, detect, read_trace
from simulator.workload import WorkloadRequest

DATA = Path(__file__).parent.parent / "data"


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_mooncake_rows_keep_lengths_and_prefix_ids() -> None:
    workload = read_trace(DATA / "conversation_60.jsonl")
    assert (workload.name, workload.span_tokens, len(workload.requests)) == ("conversation_60", 512, 60)
    assert workload.requests[3] == WorkloadRequest(0, 2290, 316, (0, 42, 43, 44, 45))
    assert workload.requests[-1].arrival_us % 3_000_000 == 0


def test_azure_2023_counts_from_its_first_request() -> None:
    workload = read_trace(DATA / "azure_2023_5.csv")
    assert workload.requests[0] == WorkloadRequest(0, 374, 44)
    assert workload.requests[1] == WorkloadRequest(4_314_579, 396, 109)


def test_azure_2024_has_an_offset_in_its_times(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2024-05-12 00:00:00.001000+00:00,100,10",
        "2024-05-12 00:00:02+00:00,200,20",
    )
    assert read_trace(path).requests == [WorkloadRequest(0, 100, 10), WorkloadRequest(1_999_000, 200, 20)]


def test_burstgpt_leaves_failed_requests_out(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,ChatGPT,472,18,490,Conversation log",
        "45,ChatGPT,1087,0,1087,Conversation log",
        "118.5,GPT-4,417,276,693,API log",
    )
    assert read_trace(path).requests == [WorkloadRequest(0, 472, 18), WorkloadRequest(113_500_000, 417, 276)]


def test_qwen_bailian_has_blocks_of_16_tokens(tmp_path: Path) -> None:
    row = '{"chat_id": 7, "timestamp": 1.5, "input_length": 40, "output_length": 3, "hash_ids": [1, 2, 3]}'
    workload = read_trace(written(tmp_path, row))
    assert workload.span_tokens == 16
    assert workload.requests == [WorkloadRequest(0, 40, 3, (1, 2, 3), "7")]


def test_plain_lengths(tmp_path: Path) -> None:
    path = written(tmp_path, "arrival_ms,input_length,output_length", "46.927,2358,531", "347.939,1034,769")
    assert read_trace(path).requests == [WorkloadRequest(0, 2358, 531), WorkloadRequest(301_012, 1034, 769)]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ('{"timestamp": 0, "output_length": 5, "hash_ids": [0]}', "input_length: missing"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}', "input_length"),
        ('{"timestamp": 0, "input_length": 1e9, "output_length": 5, "hash_ids": []}', "input_length"),
        ('{"timestamp": 0, "input_length": 5.5, "output_length": 5, "hash_ids": [0]}', "input_length"),
        ('{"timestamp": 0, "input_length": true, "output_length": 5, "hash_ids": [0]}', "input_length"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 5, "hash_ids": [0]}', "timestamp"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 5, "hash_ids": [0]}', "timestamp"),
        ('{"timestamp": 0, "input_length": 5, "output_length": "x", "hash_ids": [0]}', "output_length"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0, 1]}', "hash_ids: 2 ids for 5 tokens"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": ["a"]}', "hash_ids"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": 3}', "hash_ids"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [-1]}', "hash_ids: not a list"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [99999999999999999999]}', "hash_ids"),
        ('{"timestamp": 1e300, "input_length": 5, "output_length": 5, "hash_ids": [0]}', "time: 1e+297 s after"),
        ('{"timestamp": 0, "input_len', "not JSON"),
        ("[1, 2]", "not a JSON object"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(tmp_path: Path, row: str, field: str) -> None:
    good = '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}'
    path = written(tmp_path, good, row)
    with pytest.raises(TraceError) as raised:
        read_trace(path, "mooncake")
    assert str(raised.value).startswith(f"{path}, line 2")
    assert field in str(raised.value)


def test_time_that_goes_back_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, "arrival_ms,input_length,output_length", "5000,10,1", "3000,10,1")
    with pytest.raises(TraceError, match=r"line 3, time: 2 s before the line above"):
        read_trace(path)


@pytest.mark.parametrize("cells", ["2023-13-40 00:00:00,5,5", ",5,5", "yesterday,5,5"])
def test_a_bad_date_is_an_error(tmp_path: Path, cells: str) -> None:
    with pytest.raises(TraceError, match="line 2, TIMESTAMP"):
        read_trace(written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", cells))


def test_a_csv_row_with_too_few_cells_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 2, output_length: missing"):
        read_trace(written(tmp_path, "arrival_ms,input_length,output_length", "1,10"))


def test_an_endless_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "endless.jsonl"
    path.write_bytes(b'{"timestamp": ' + b"0" * (LINE_BYTES_MAX + 10))
    with pytest.raises(TraceError, match="line 1: longer than"):
        read_trace(path)


def test_bytes_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b"{\xff\xfe}\n")
    with pytest.raises(TraceError, match="line 1: not UTF-8 at byte 1"):
        read_trace(path)


def test_a_file_that_is_not_there_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
    empty = tmp_path / "empty.csv"
    empty.write_text("arrival_ms,input_length,output_length\n")
    with pytest.raises(TraceError, match="no requests"):
        read_trace(empty)


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    path = written(tmp_path, "a,b,c", "1,2,3")
    with pytest.raises(TraceError, match="name the format"):
        detect(path)
    with pytest.raises(TraceError, match="known: auto, azure, burstgpt"):
        read_trace(path, "sharegpt")
