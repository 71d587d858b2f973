"""A recorded loop decides the same when it is replayed."""

from __future__ import annotations

from pathlib import Path

from decode_worker.core.core import DecodeCore
from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_hash import token_bytes
from segue.block_pool import BlockPool
from segue.handoff import HandoffTiming
from segue.ids import InstanceRef
from segue.sampling_params import SamplingParams
from segue.worker_messages import Assign
from worker_runtime.events import Assigned, Event, PlanFinished, RunPlan
from worker_runtime.recording import Recorder, first_difference, read_recording
from worker_runtime.toy_engine import ToyEngine


def fresh_core(pages: int = 16) -> DecodeCore:
    pool = BlockPool(pages, 4)
    planner = BatchPlanner(pool, PlannerLimits(4, 8, 256), ())
    return DecodeCore(InstanceRef("d", 1), planner, pool, HandoffTiming(lease_us=1_000_000))


def record(path: Path) -> int:
    """Two local requests to their end; the number of steps."""
    core, engine, recorder = fresh_core(), ToyEngine(16, 4), Recorder(path)
    events: list[Event] = [
        Assigned(
            Assign(
                request_id=f"r{number}",
                attempt=1,
                gateway="g",
                token_ids=token_bytes(range(number, number + 9)),
                tokens_prompt=9,
                sampling=SamplingParams(max_tokens=5, logprobs=1),
            ),
            "c",
        )
        for number in range(2)
    ]
    now_us = 0
    while events:
        now_us += 1000
        decisions = core.step(now_us, events)
        recorder.write(now_us, events, decisions)
        for decision in decisions:
            if isinstance(decision, RunPlan):
                engine.launch(decision.plan)
        events = [PlanFinished(engine.collect()) for decision in decisions if isinstance(decision, RunPlan)]
    recorder.close()
    return now_us // 1000


def test_replay_decides_the_same(tmp_path: Path) -> None:
    steps = record(tmp_path / "steps")
    assert len(list(read_recording(tmp_path / "steps"))) == steps > 5
    assert first_difference(read_recording(tmp_path / "steps"), fresh_core()) is None


def test_replay_on_another_machine_shows_where_it_differs(tmp_path: Path) -> None:
    record(tmp_path / "steps")
    difference = first_difference(read_recording(tmp_path / "steps"), fresh_core(pages=3))
    assert difference is not None


def test_torn_end_of_a_recording_is_left_out(tmp_path: Path) -> None:
    steps = record(tmp_path / "steps")
    raw = (tmp_path / "steps").read_bytes()
    (tmp_path / "steps").write_bytes(raw[:-3])
    assert len(list(read_recording(tmp_path / "steps"))) == steps - 1
