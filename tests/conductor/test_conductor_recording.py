"""Recordings begin with the settings they were made with, replay to the same decisions, and name what differs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from conductor_world import World

from conductor.core.admission import Objectives
from conductor.core.events import Event, Tick
from conductor.core.settings import CoreSettings, make_core
from conductor.recording import Recorder, Started, Step, UnreadableRecording, first_difference, read_recording
from segue.cost_model import CostModel, DecodeCost, PrefillCost
from segue.manifest import Role
from segue.worker_messages import OutcomeKind

SETTINGS = CoreSettings(
    models_known=("toy",),
    queue_max=3,
    objectives=Objectives(ttft_us=40_000.0, ttft_factor=0.0),
    cost=CostModel(
        prefill=PrefillCost(base_us=0.0, token_us=1_000.0, pair_us=0.0),
        decode=DecodeCost(base_us=10_000.0, row_us=1_000.0, kv_token_us=0.0),
        kv_token_bytes=16,
    ),
    tenant_weights={"gold": 3.0},
)


class RecordingWorld(World):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__(make_core(SETTINGS))
        self._recorder = recorder

    def step(self, *events: Event) -> list[object]:  # type: ignore[override]
        decisions = super().step(*events)
        self._recorder.record(self.now_us, events, decisions)
        return decisions  # type: ignore[return-value]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Requests of two tenants, some rejected, some served; then the Conductor is started again."""
    path = tmp_path / "run.rec"
    for _ in range(2):
        recorder = Recorder(path, SETTINGS)
        made = RecordingWorld(recorder)
        made.join("p1", Role.PREFILL)
        made.join("d1", Role.DECODE)
        for n in range(8):
            made.now_us += 3_000
            made.submit(f"r{n}", tenant="gold" if n % 2 else "", priority=n % 3)
        made.outcome("p1", "r0", OutcomeKind.PREFILL_DONE)
        made.outcome("d1", "r0", OutcomeKind.HANDOFF_COMPLETE)
        made.wait(50_000)
        made.outcome("d1", "r0", OutcomeKind.FINISHED, tokens_generated=3, reason="stop")
        made.finish("r0")
        recorder.close()
    return path


def test_a_recording_of_two_starts_replays_to_the_same_decisions(recording: Path) -> None:
    records = list(read_recording(recording))
    assert [record.settings for record in records if isinstance(record, Started)] == [SETTINGS, SETTINGS]
    kinds = {type(each).__name__ for record in records if isinstance(record, Step) for each in record.decisions}
    assert {"Route", "Reject"} <= kinds
    assert first_difference(records) is None


def test_other_settings_decide_otherwise_and_the_step_is_named(recording: Path) -> None:
    lenient = msgspec.structs.replace(SETTINGS, objectives=None)
    records = [
        Started(record.version, lenient) if isinstance(record, Started) else record
        for record in read_recording(recording)
    ]
    difference = first_difference(records)
    assert difference is not None
    assert difference.decided != difference.recorded.decisions
    assert [record for record in records if isinstance(record, Step)][difference.number] == difference.recorded


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(b"\x02\x00\x00\x00\xc0\xc0")
    with pytest.raises(UnreadableRecording, match="other"):
        list(read_recording(path))


def test_a_recording_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old.rec"
    with monkeypatch.context() as patched:
        patched.setattr("conductor.recording.FORMAT_VERSION", 0)
        Recorder(path).close()
    with pytest.raises(UnreadableRecording, match="format 0"):
        list(read_recording(path))


def test_steps_without_settings_are_refused() -> None:
    with pytest.raises(UnreadableRecording, match="settings"):
        first_difference([Step(0, [Tick()], [])])
