"""An instance keeps streams to as many Conductors as segue/limits.py says, and goes on without the others."""

from __future__ import annotations

import asyncio

import pytest

from segue.limits import CONDUCTORS_MAX
from worker_runtime.conductors import Conductors


class Link:
    def __init__(self, address: str) -> None:
        self.address = address

    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("beyond", [0, 1])
async def test_no_more_conductors_are_dialled_than_the_maximum(beyond: int, caplog: pytest.LogCaptureFixture) -> None:
    addresses = [f"c{number}:1" for number in range(CONDUCTORS_MAX + beyond)]
    conductors = Conductors(addresses, Link, None)  # type: ignore[arg-type]
    running = asyncio.create_task(conductors.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert list(conductors.links) == addresses[:CONDUCTORS_MAX]
    assert [record.getMessage() for record in caplog.records] == [
        f"conductor {address} is not dialled: {CONDUCTORS_MAX} are" for address in addresses[CONDUCTORS_MAX:]
    ]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
