"""Published events: gaps are seen, replay closes them, hostile bytes are counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvstore.events import EventLog, SequenceTracker, Verdict
from kvstore.events_zmq import EventPublisher, EventSubscriber, MalformedEvent, decode_published
from segue.ids import InstanceRef
from segue.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventBatch, LoadReport

REF = InstanceRef("d0", 5)


def stored(number: int) -> BlocksStored:
    return BlocksStored(b"", [number.to_bytes(16, "little")])


def load(sequence: int) -> LoadReport:
    fields = ("running", "waiting", "tokens_queued", "tokens_running", "step_us")
    pages = ("pages_free", "pages_active", "pages_cached", "pages_held", "pages_quarantined", "pages_total")
    return LoadReport(ref=REF, sequence=sequence, **dict.fromkeys(fields + pages, 0))


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[EventPublisher]:
    made = EventPublisher(REF, lambda: [BlocksCleared(), stored(99)])
    made.bind(f"ipc://{tmp_path}/events")
    yield made
    made.close()


async def until_heard(publisher: EventPublisher, subscriber: EventSubscriber) -> None:
    """PUB drops what it says before the subscription arrives: talk until one message is heard."""
    while True:
        publisher.publish_load(load(publisher.next_sequence))
        try:
            await asyncio.wait_for(subscriber.receive(), 0.05)
            return
        except TimeoutError:
            continue


async def test_subscriber_receives_events_and_reports_in_order(publisher: EventPublisher) -> None:
    subscriber = EventSubscriber()
    subscriber.add(publisher.address)
    await until_heard(publisher, subscriber)
    publisher.publish_kv([stored(1), BlocksRemoved([b"x" * 16])])
    message = await subscriber.receive()
    while isinstance(message, LoadReport):
        message = await subscriber.receive()
    assert message.events == [stored(1), BlocksRemoved([b"x" * 16])]
    assert message.ref == REF
    subscriber.close()


async def test_late_subscriber_sees_a_gap_and_a_snapshot_closes_it(publisher: EventPublisher) -> None:
    publisher.publish_kv([stored(1)])
    subscriber, tracker = EventSubscriber(), SequenceTracker()
    subscriber.add(publisher.address)
    await until_heard(publisher, subscriber)
    publisher.publish_kv([stored(2)])
    assert tracker.accept(await subscriber.receive()) is Verdict.GAP
    publisher.resync(tracker.seen(REF))
    message = await subscriber.receive()
    while not isinstance(message, KvEventBatch) or not message.snapshot:
        assert tracker.accept(message) is Verdict.GAP
        message = await subscriber.receive()
    assert tracker.accept(message) is Verdict.APPLY
    assert message.events == [BlocksCleared(), stored(99)]
    subscriber.close()


async def test_malformed_messages_are_counted_and_skipped(publisher: EventPublisher, tmp_path: Path) -> None:
    subscriber, context = EventSubscriber(), zmq.Context()
    rogue = context.socket(zmq.PUB)
    rogue.bind(f"ipc://{tmp_path}/rogue")
    subscriber.add(f"ipc://{tmp_path}/rogue")
    subscriber.add(publisher.address)
    while subscriber.malformed == 0:
        rogue.send(b"\xc1 not msgpack")
        await until_heard(publisher, subscriber)
    rogue.close()
    context.term()
    subscriber.close()


def test_removing_an_unknown_address_is_ignored() -> None:
    subscriber = EventSubscriber()
    subscriber.remove("ipc:///nowhere")
    subscriber.close()


@given(st.binary(max_size=64))
def test_any_bytes_decode_or_raise_malformed(raw: bytes) -> None:
    with contextlib.suppress(MalformedEvent):
        decode_published(raw)


def test_replay_gives_exactly_what_was_missed() -> None:
    log = EventLog(REF)
    said = [batch for number in range(5) for batch in log.batches([stored(number)])]
    assert log.after(2) == said[2:]
    assert log.after(5) == []


def test_replay_beyond_what_is_kept_needs_a_snapshot() -> None:
    log = EventLog(REF, blocks_kept_max=4)
    for number in range(5):
        list(log.batches([stored(number)]))
    assert log.after(1) is None
    assert log.after(9) is None
    assert [message.sequence for message in log.after(3) or []] == [4, 5]


def test_what_is_kept_is_bounded_by_blocks_however_few_events_name_them() -> None:
    log = EventLog(REF, blocks_kept_max=1000)
    prompt = BlocksStored(b"", [number.to_bytes(16, "little") for number in range(300)])
    for _ in range(20):
        list(log.batches([prompt]))
    assert log.after(16) is None
    assert len(log.after(17) or []) == 3


def test_events_of_a_predecessor_are_not_believed() -> None:
    tracker = SequenceTracker()
    assert tracker.accept(KvEventBatch(REF, 1, [])) is Verdict.APPLY
    newer = InstanceRef(REF.uuid, REF.incarnation + 1)
    assert tracker.accept(KvEventBatch(newer, 7, [])) is Verdict.RESTARTED
    assert tracker.accept(KvEventBatch(REF, 2, [])) is Verdict.DUPLICATE
    assert tracker.accept(KvEventBatch(newer, 8, [BlocksCleared()], True)) is Verdict.APPLY
    assert tracker.seen(newer) == 8


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 8))
def test_reader_that_asks_on_gaps_ends_with_the_publishers_events(heard: list[bool], kept: int) -> None:
    """Whatever is lost, replays and snapshots rebuild the same set of blocks."""
    log, tracker = EventLog(REF, blocks_kept_max=kept), SequenceTracker()
    truth: list[KvEvent] = []
    believed: set[bytes] = set()

    def apply(batch: KvEventBatch) -> Verdict:
        verdict = tracker.accept(batch)
        if verdict is Verdict.APPLY:
            for event in batch.events:
                if isinstance(event, BlocksCleared):
                    believed.clear()
                elif isinstance(event, BlocksStored):
                    believed.update(event.hashes)
        return verdict

    for number, arrives in enumerate([*heard, True]):
        truth.append(stored(number))
        for batch in list(log.batches([stored(number)])):
            if arrives and apply(batch) is not Verdict.APPLY:
                missed = log.after(tracker.seen(REF))
                answer = list(log.batches([BlocksCleared(), *truth], snapshot=True)) if missed is None else missed
                for message in answer:
                    assert isinstance(message, KvEventBatch)
                    apply(message)
    assert believed == {event.hashes[0] for event in truth if isinstance(event, BlocksStored)}
