"""Server-sent events from bytes, however they were cut (WHATWG HTML, section 9.2.6; only `data` is of use here)."""

from __future__ import annotations

EVENT_BYTES_MAX = 16 << 20
"""One event; a server that sends no blank line must not fill the client's memory."""


class EventTooLong(ValueError):
    """The peer sent more than EVENT_BYTES_MAX without ending an event."""


class EventReader:
    """`feed` bytes, get the data of every event that they completed. Lines end in LF, CRLF or CR."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False
        """The last byte seen was a CR: an LF that follows belongs to it."""

    def feed(self, received: bytes) -> list[bytes]:
        if self._after_cr and received.startswith(b"\n"):
            received = received[1:]
        if received:
            self._after_cr = received.endswith(b"\r")
        self._rest += received
        events: list[bytes] = []
        *lines, rest = bytes(self._rest).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            self._line(line, events)
        if self._size + len(rest) > EVENT_BYTES_MAX:
            raise EventTooLong(f"an event of more than {EVENT_BYTES_MAX} bytes")
        return events

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
            self._data, self._size = [], 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(value)
