"""Server-sent events come out the same however the bytes were cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_client import event_stream
from bench_client.event_stream import EventReader, EventTooLong

LINES = st.lists(
    st.sampled_from([b"data: a", b"data:b", b"data:  c", b"data", b": comment", b"event: x", b"", b"", b"id: 7"]),
    max_size=20,
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


def whole(stream: bytes) -> list[bytes]:
    """The specification in a few lines, for complete streams only."""
    events, held = [], []
    for line in stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[:-1]:
        if not line and held:
            events.append(b"\n".join(held))
        if not line:
            held = []
        elif line.partition(b":")[0] == b"data":
            held.append(line.partition(b":")[2].removeprefix(b" "))
    return events


@given(lines=LINES, end=ENDS, data=st.data())
def test_any_chunking_gives_the_same_events(lines: list[bytes], end: bytes, data: st.DataObject) -> None:
    stream = b"".join(line + end for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader, events = EventReader(), []
    for begin, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        events += reader.feed(stream[begin:stop])
    assert events == whole(stream)


def test_an_event_is_given_when_it_is_complete_and_not_before() -> None:
    reader = EventReader()
    assert reader.feed(b"data: one\n") == []
    assert reader.feed(b"\ndata: tw") == [b"one"]
    assert reader.feed(b"o\n\n") == [b"two"]


def test_a_peer_that_never_ends_an_event_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "EVENT_BYTES_MAX", 100)
    reader = EventReader()
    reader.feed(b"data: " + b"x" * 60 + b"\n")
    with pytest.raises(EventTooLong):
        reader.feed(b"data: " + b"x" * 60)
