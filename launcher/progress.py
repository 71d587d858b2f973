"""What the person who starts a cluster sees: one line for each thing done, a spinner for the one in progress."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


class Progress:
    """On a terminal the running step spins; elsewhere each step is a plain line when it is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """A line as it is: no markup, no wrapping, so that it can be pasted."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def done(self, text: str) -> None:
        self.say(f"{time.monotonic() - self._started:5.1f} s  {text}")

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        with self._console.status(text):
            yield
