"""Real P and D processes whose hand-off connection is cut while one of them says its last word about an attempt.

The lease is a quarter of an hour and heartbeats are rare: what ends before is found by the lists that are exchanged
over the new connection.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from byte_proxy import ByteProxy
from front_rig import Front, WorkerProcess, worker_config
from test_faulty_network import until_no_page_is_used

from segue.ids import AttemptRef
from segue.manifest import Role
from segue.sampling_params import SamplingParams
from segue.worker_messages import OutcomeKind
from worker_runtime.toy_engine import toy_tokens

LEASE_MS = 900_000
STEP_MS = 150
PROMPT = list(range(3, 403))
"""25 chunks of 16 tokens: four seconds."""

SAMPLING = SamplingParams(seed=3, max_tokens=3, ignore_eos=True)
TOY_INSTANCE = Path(__file__).parents[1] / "endurance" / "toy_instance.py"


class CutPair:
    """P dials the control address of D through a proxy."""

    def __init__(self, front: Front, folder: Path) -> None:
        self.front = front
        self._folder = folder
        self._workers: list[WorkerProcess] = []
        self.proxy: ByteProxy | None = None

    async def start(self) -> None:
        for role in (Role.DECODE, Role.PREFILL):
            config = worker_config(self.front, role, self._folder)
            scheduler = msgspec.structs.replace(config.scheduler, handoff_lease_ms=LEASE_MS)
            engine = msgspec.structs.replace(config.engine, pages=256)
            config = msgspec.structs.replace(config, scheduler=scheduler, engine=engine, runtime_dir="")
            worker = WorkerProcess(config, [sys.executable, str(TOY_INSTANCE)])
            self._workers.append(worker)
            await worker.start()
        for worker in self._workers:
            await worker.ready()
        decode = self.front.workers["decode-0"]
        self.proxy = ByteProxy(decode.manifest.control_address.removeprefix("tcp://"))
        address = f"tcp://{self.proxy.location}"
        decode.manifest = msgspec.structs.replace(decode.manifest, control_address=address)

    def submit(self, request_id: str, prompt: list[int]) -> AttemptRef:
        return self.front.submit(request_id, prompt, SAMPLING, prefill="prefill-0", decode="decode-0")

    async def cancel_unheard(self, name: str, key: AttemptRef) -> None:
        """What this side says of it to the other is lost."""
        assert self.proxy is not None
        self.proxy.faults.swallow_at = self.proxy.bytes_seen
        self.front.cancel(name, key)
        await self.front.until(lambda: OutcomeKind.CANCELLED in self.front.kinds(key))

    def cut(self) -> None:
        assert self.proxy is not None
        self.proxy.cut()
        self.proxy.faults.swallow_at = None

    async def until_failed(self, key: AttemptRef) -> str:
        """The reason."""
        await self.front.until(lambda: OutcomeKind.FAILED in self.front.kinds(key))
        return next(outcome.reason for outcome in self.front.outcomes[key] if outcome.kind is OutcomeKind.FAILED)

    async def close(self) -> None:
        for worker in self._workers:
            await worker.stop()
        if self.proxy is not None:
            self.proxy.close()


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CutPair]:
    monkeypatch.setenv("TOY_STEP_MS", str(STEP_MS))
    front = Front()
    await front.start()
    made = CutPair(front, tmp_path)
    await made.start()
    yield made
    await made.close()
    await front.close()


@pytest.mark.parametrize(
    ("cancelled", "reason"),
    [("prefill-0", "prefill instance has let it go"), ("decode-0", "decode instance has let it go")],
)
async def test_last_word_that_a_cut_swallowed_costs_no_lease(pair: CutPair, cancelled: str, reason: str) -> None:
    key = pair.submit("r", PROMPT)
    await pair.front.until(lambda: OutcomeKind.PREFILL_STARTED in pair.front.kinds(key))
    await pair.cancel_unheard(cancelled, key)
    pair.cut()
    assert await pair.until_failed(key) == reason
    for name in ("prefill-0", "decode-0"):
        await until_no_page_is_used(pair.front, name)
    again = pair.submit("again", PROMPT[:20])
    await pair.front.until(lambda: pair.front.finish(again))
    assert pair.front.generated(again) == toy_tokens(PROMPT[:20], 3, seed=3)


async def test_stream_is_handed_over_although_the_connection_is_cut(pair: CutPair) -> None:
    key = pair.submit("r", PROMPT[:100])
    await pair.front.until(lambda: OutcomeKind.PREFILL_STARTED in pair.front.kinds(key))
    pair.cut()
    await pair.front.until(lambda: pair.front.finish(key))
    assert pair.front.generated(key) == toy_tokens(PROMPT[:100], 3, seed=3)
    assert OutcomeKind.FAILED not in pair.front.kinds(key)
