import asyncio
from pathlib import Path

import grpc
import msgspec
import pytest
from conductor_world import manifest
from front_process import CARD, HeardByGateway, Worker, front, routed, until, worker
from segue_proto.v1 import worker_pb2

from conductor.ports import Placement
from conductor.recording import Step, TruncatedRecording, first_difference, read_recording
from segue.errors import DuplicateRequest, UnknownModel
from segue.ids import InstanceRef
from segue.kv_events import BlocksStored
from segue.limits import INSTANCE_NAME_CHARS_MAX
from segue.manifest import Role
from segue.wire_version import WIRE_VERSION
from segue.worker_messages import Assign, CancelAttempt, Outcome, OutcomeKind

P1 = manifest("p1", Role.PREFILL)
D1 = manifest("d1", Role.DECODE)
HASHES = routed("x").block_hashes


async def test_the_card_is_asked_for_once() -> None:
    async with front() as conductor:
        first, second = Worker(conductor.port, P1), Worker(conductor.port, D1)
        assert (await first.register()).registered.need_card
        await until(lambda: conductor.core.fleet.instances)
        answer = await second.register()
        assert (answer.registered.need_card, answer.registered.heartbeat_ms) == (False, 1000)
        await until(conductor.loop.models)
        served = conductor.loop.models()["toy"]
        assert (served.card, served.block_size, served.max_model_len) == (CARD, 4, 200)
        await first.close()
        await second.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"wire_version": 99}, f"wire version differs: the Conductor has {WIRE_VERSION}, p1 has 99"),
        ({"model": "other"}, "model 'other' is not one of those configured: toy"),
        ({"pages_total": 0}, "pages_total is 0, must be positive"),
        ({"kv_root": "no hex"}, "kv_root is not hexadecimal"),
        ({"name": "p" * (INSTANCE_NAME_CHARS_MAX + 1)}, "uuid and name take at most 128 characters"),
        ({"ref": InstanceRef("p" * 129, 1)}, "uuid and name take at most 128 characters"),
    ],
)
async def test_a_manifest_that_cannot_serve_is_refused(changes: dict[str, object], reason: str) -> None:
    async with front(models=("toy",)) as conductor:
        stranger = Worker(conductor.port, msgspec.structs.replace(P1, **changes))
        assert (await stranger.register()).refused.reason == reason
        assert await stranger.receive() is None, "the stream ends"
        await stranger.close()


async def test_manifest_of_another_version_is_refused_for_that_however_it_is_made() -> None:
    async with front() as conductor:
        stranger = Worker(conductor.port, P1)
        stranger.manifest = {"name": "p9", "wire_version": 99, "layout": "new"}  # type: ignore[assignment]
        reason = (await stranger.register()).refused.reason
        assert reason == f"wire version differs: the Conductor has {WIRE_VERSION}, p9 has 99"
        await stranger.close()


async def test_bytes_that_are_no_manifest_are_refused() -> None:
    async with front() as conductor:
        stranger = Worker(conductor.port, P1)
        stranger.manifest = {"name": "p1", "wire_version": WIRE_VERSION}  # type: ignore[assignment]
        assert (await stranger.register()).refused.reason.startswith("InstanceManifest: ")
        await stranger.close()


async def test_a_worker_whose_events_cannot_be_heard_does_not_join() -> None:
    async with front() as conductor:
        stranger = Worker(conductor.port, msgspec.structs.replace(P1, events_address="nonsense"))
        await stranger.register()
        refusal = await stranger.receive()
        assert refusal is not None and refusal.refused.reason.startswith("events_address 'nonsense': ")
        assert not conductor.core.fleet.instances
        await stranger.close()
        async with worker(conductor.port, P1):
            await until(lambda: conductor.core.fleet.instances)


async def test_what_is_no_message_is_refused_as_such() -> None:
    async with front() as conductor, grpc.aio.insecure_channel(f"127.0.0.1:{conductor.port}") as channel:
        call = channel.stream_stream("/segue.v1.WorkerControl/Attach")()
        await call.write(b"\xff\xff")
        answer = worker_pb2.ConductorMessage.FromString(await call.read())
        assert answer.refused.reason.startswith("WorkerMessage: ")
        call.cancel()


async def test_a_card_that_is_not_the_manifests_is_refused() -> None:
    async with front() as conductor:
        liar = Worker(conductor.port, P1)
        await liar.register(msgspec.structs.replace(CARD, digest="forged"))
        answer = await liar.receive()
        assert answer is not None and "forged" in answer.refused.reason
        assert not conductor.core.fleet.instances
        await liar.close()


async def test_a_name_cannot_be_taken_twice() -> None:
    async with front() as conductor, worker(conductor.port, P1):
        await until(lambda: conductor.core.fleet.instances)
        thief = Worker(conductor.port, msgspec.structs.replace(P1, ref=InstanceRef("other", 1)))
        assert "taken by instance p1" in (await thief.register()).refused.reason
        await thief.close()


async def test_a_request_reaches_both_instances_and_comes_to_its_end() -> None:
    gateway = HeardByGateway()
    async with front() as conductor, worker(conductor.port, P1) as p1, worker(conductor.port, D1) as d1:
        await until(lambda: len(conductor.core.fleet.instances) == 2)
        conductor.loop.submit(routed("r", deadline_ms=5000), gateway)
        for instance in (p1, d1):
            message = await instance.receive()
            assert message is not None
            assign = message.assign
            assert (assign.request_id, assign.attempt, assign.tokens_prompt) == ("r", 1, 8)
            assert (assign.prefill.name, assign.decode.name) == ("p1", "d1")
            assert assign.decode.control_address == "ipc://d1"
            assert 0 < assign.deadline_ms <= 5000
        await p1.report(Outcome(request_id="r", attempt=1, kind=OutcomeKind.PREFILL_DONE))
        await d1.report(Outcome(request_id="r", attempt=1, kind=OutcomeKind.HANDOFF_COMPLETE))
        await until(lambda: len(gateway.heard) == 2)
        placement = Placement(prefill="p1", decode="d1")
        assert gateway.heard == [("placed", "r", 1, placement), ("handoff", "r", 1)]
        conductor.loop.finish("r", "stop")
        message = await d1.receive()
        assert message is not None
        assert (message.cancel.request_id, message.cancel.attempt, message.cancel.reason) == ("r", 1, "stop")
        assert conductor.core.attempts_live == 0


async def test_a_live_request_id_is_refused_and_an_unknown_model_rejected() -> None:
    gateway = HeardByGateway()
    async with front() as conductor, worker(conductor.port, D1):
        await until(lambda: conductor.core.fleet.instances)
        conductor.loop.submit(routed("r"), gateway)
        with pytest.raises(DuplicateRequest):
            conductor.loop.submit(routed("r"), gateway)
        conductor.loop.submit(routed("other", model="nobody's"), gateway)
        await until(lambda: len(gateway.heard) == 2)
        [rejected] = [heard for heard in gateway.heard if heard[0] == "rejected"]
        assert rejected[1:3] == ("other", 1)
        assert isinstance(rejected[3], UnknownModel)


async def test_a_gateway_that_fails_on_one_request_disturbs_no_other() -> None:
    class Broken(HeardByGateway):
        def on_placed(self, request_id: str, attempt: int, placement: Placement) -> None:
            raise RuntimeError("our bug")

    gateway = HeardByGateway()
    async with front() as conductor, worker(conductor.port, D1):
        await until(lambda: conductor.core.fleet.instances)
        conductor.loop.submit(routed("bad"), Broken())
        conductor.loop.submit(routed("good"), gateway)
        await until(lambda: gateway.heard and conductor.core.attempts_live == 1)
        assert gateway.heard[0][:2] == ("placed", "good")


async def test_a_broken_stream_fails_the_attempt_and_the_next_one_runs_elsewhere() -> None:
    gateway = HeardByGateway()
    d2 = manifest("d2", Role.DECODE)
    async with front() as conductor, worker(conductor.port, P1) as p1, worker(conductor.port, D1) as d1:
        await until(lambda: len(conductor.core.fleet.instances) == 2)
        conductor.loop.submit(routed("r"), gateway)
        await d1.receive()
        await p1.receive()
        async with worker(conductor.port, d2) as spare:
            await until(lambda: len(conductor.core.fleet.instances) == 3)
            await d1.close()
            await until(lambda: len(gateway.heard) == 2)
            assert gateway.heard[1][:3] == ("failed", "r", 1)
            cancel = await p1.receive()
            assert cancel is not None and cancel.cancel.attempt == 1
            conductor.loop.submit(routed("r", attempt=2), gateway)
            assign = await spare.receive()
            assert assign is not None and assign.assign.attempt == 2


class KeptLink:
    """A `WorkerLink` that keeps the cancels."""

    def __init__(self) -> None:
        self.cancels: list[CancelAttempt] = []

    def cancel(self, cancel: CancelAttempt) -> None:
        self.cancels.append(cancel)

    def assign(self, assign: Assign) -> None: ...

    def resync(self, sequence_seen: int) -> None: ...

    def drain(self) -> None: ...


async def test_a_pair_that_is_lost_at_once_is_told_on_return_what_ended_meanwhile() -> None:
    """P's loss ends the attempt while D's stream is gone already: its cancel must not be lost with the stream."""
    gateway = HeardByGateway()
    async with front() as conductor, worker(conductor.port, P1) as p1, worker(conductor.port, D1) as d1:
        await until(lambda: len(conductor.core.fleet.instances) == 2)
        conductor.loop.submit(routed("r"), gateway)
        await d1.receive()
        conductor.loop.lost(P1.ref, "silent")
        conductor.loop.lost(D1.ref, "silent")
        await until(lambda: not conductor.core.fleet.instances)
        links = {instance: KeptLink() for instance in (p1, d1)}
        for instance, link in links.items():
            conductor.loop.joined(instance.manifest, link)
        await until(lambda: all(link.cancels for link in links.values()))
        for link in links.values():
            assert [(cancel.request_id, cancel.attempt) for cancel in link.cancels] == [("r", 1)]


async def test_a_new_incarnation_takes_the_place_of_the_old_stream() -> None:
    gateway = HeardByGateway()
    async with front() as conductor, worker(conductor.port, P1), worker(conductor.port, D1) as old:
        await until(lambda: len(conductor.core.fleet.instances) == 2)
        conductor.loop.submit(routed("r"), gateway)
        await old.receive()
        async with worker(conductor.port, msgspec.structs.replace(D1, ref=InstanceRef("d1", 2))) as new:
            assert await old.receive() is None, "the old stream is closed"
            await until(lambda: len(gateway.heard) == 2)
            assert gateway.heard[1] == ("failed", "r", 1, "d1 was lost: it registered again")
            conductor.loop.submit(routed("r", attempt=2), gateway)
            assign = await new.receive()
            assert assign is not None and assign.assign.decode.ref.incarnation == 2


async def test_a_silent_worker_is_lost_and_a_beating_one_is_not() -> None:
    async with front() as conductor, worker(conductor.port, P1) as silent, worker(conductor.port, D1) as beating:
        await until(lambda: len(conductor.core.fleet.instances) == 2)

        async def beat() -> None:
            while True:
                await beating.send(heartbeat=worker_pb2.WorkerHeartbeat(steps=1))
                await asyncio.sleep(0.5)

        heart = asyncio.create_task(beat())
        await until(lambda: "p1" not in conductor.core.fleet.instances)
        assert await silent.receive() is None
        assert "d1" in conductor.core.fleet.instances
        heart.cancel()


async def test_a_worker_that_says_it_drains_gets_no_new_work() -> None:
    async with front() as conductor, worker(conductor.port, D1) as d1:
        await until(conductor.loop.models)
        await d1.send(heartbeat=worker_pb2.WorkerHeartbeat(draining=True))
        await until(lambda: conductor.loop.cluster().instances[0].draining)
        assert conductor.loop.models() == {}


async def test_a_drain_reaches_the_worker() -> None:
    async with front() as conductor, worker(conductor.port, D1) as d1:
        await until(lambda: conductor.core.fleet.instances)
        conductor.loop.drain("d1")
        message = await d1.receive()
        assert message is not None and message.WhichOneof("body") == "drain"


async def test_blocks_published_before_the_conductor_listened_are_asked_for_over_the_control_stream() -> None:
    held = [BlocksStored(b"", HASHES)]
    async with front() as conductor, worker(conductor.port, P1, held) as p1:
        assert p1.events is not None
        await until(lambda: conductor.core.fleet.instances)

        async def go_on() -> None:
            while True:
                p1.events.publish_kv([BlocksStored(b"", [b"other".rjust(16)])])
                await asyncio.sleep(0.05)

        publishing = asyncio.create_task(go_on())
        message = await p1.receive()
        publishing.cancel()
        assert message is not None
        assert (message.WhichOneof("body"), message.resync.sequence_seen) == ("resync", 0)
        p1.events.resync(0)
        await until(lambda: conductor.core.index.match(HASHES) == {"p1": 2})


async def test_a_recording_replays_to_the_same_decisions(tmp_path: Path) -> None:
    path = tmp_path / "conductor.rec"
    gateway = HeardByGateway()
    async with front(record=path) as conductor, worker(conductor.port, P1) as p1, worker(conductor.port, D1) as d1:
        await until(lambda: len(conductor.core.fleet.instances) == 2)
        for n in range(6):
            conductor.loop.submit(routed(f"r{n}"), gateway)
        await d1.receive()
        await d1.report(Outcome(request_id="r0", attempt=1, kind=OutcomeKind.HANDOFF_COMPLETE))
        await p1.report(Outcome(request_id="r1", attempt=1, kind=OutcomeKind.FAILED, reason="boom"))
        await until(lambda: any(heard[0] == "failed" for heard in gateway.heard))
        conductor.loop.finish("r0", "stop")
        await until(lambda: conductor.core.attempts_live < 5)
    records = list(read_recording(path))
    assert sum(len(record.decisions) for record in records if isinstance(record, Step)) >= 8
    assert first_difference(records) is None

    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TruncatedRecording):
        list(read_recording(path))
