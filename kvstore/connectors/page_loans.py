"""Which pages may be written from outside, by whom, right now.

A page is lent to exactly one (source incarnation, attempt). The thread that receives holds `writing()` while the kernel
puts bytes into a page; `take_back` waits for that and no longer, so once it returns nothing of that attempt can land.

Python's locks are not fair: a receiver that takes the lock again at once could keep a waiting `take_back` out for
long. So whoever wants the lock queues at a gate, and the receiver has to pass it too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from segue.errors import InternalError
from segue.ids import AttemptRef, InstanceRef


class _Loan:
    __slots__ = ("attempt", "digest", "source")

    def __init__(self, source: InstanceRef, attempt: AttemptRef) -> None:
        self.source = source
        self.attempt = attempt
        self.digest: int | None = None
        """Of the content once it has landed: from then on the page is not written again."""


class PageLoans:
    """`lend`, `take_back` and `landed` from any thread; `is_writable` only inside `writing()`."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._lock = threading.Lock()
        self._loans: dict[int, _Loan] = {}
        self._pages: dict[tuple[InstanceRef, AttemptRef], list[int]] = {}

    def __len__(self) -> int:
        return len(self._loans)

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._gate:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def lend(self, source: InstanceRef, attempt: AttemptRef, pages: Sequence[int]) -> None:
        """Raises InternalError for a page that is lent already: two would write it."""
        with self.writing():
            taken = [page for page in pages if page in self._loans]
            if taken:
                raise InternalError(f"pages {taken} are lent twice")
            self._loans.update((page, _Loan(source, attempt)) for page in pages)
            self._pages.setdefault((source, attempt), []).extend(pages)

    def take_back(self, source: InstanceRef, attempt: AttemptRef | None = None) -> None:
        """Everything lent to `source`, or to one attempt of it."""
        with self.writing():
            every = [key for key in self._pages if key[0] == source] if attempt is None else [(source, attempt)]
            for key in every:
                for page in self._pages.pop(key, ()):
                    del self._loans[page]

    def is_lent(self, source: InstanceRef, attempt: AttemptRef, page: int) -> bool:
        return self._find(source, attempt, page) is not None

    def is_writable(self, source: InstanceRef, attempt: AttemptRef, page: int) -> bool:
        loan = self._find(source, attempt, page)
        return loan is not None and loan.digest is None

    def landed(self, source: InstanceRef, attempt: AttemptRef, page: int, digest: int, intact: bool) -> bool:
        """Note the end of a page; True when the page holds content with this digest, from now or from before."""
        with self.writing():
            loan = self._find(source, attempt, page)
            if loan is None:
                return False
            if loan.digest is None and intact:
                loan.digest = digest
            return loan.digest == digest

    def _find(self, source: InstanceRef, attempt: AttemptRef, page: int) -> _Loan | None:
        loan = self._loans.get(page)
        return loan if loan is not None and loan.source == source and loan.attempt == attempt else None
