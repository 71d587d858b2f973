"""As many requests wait in one Conductor as segue/limits.py says; the next one is told why, and when to come again."""

from __future__ import annotations

from conductor_world import World, all_of, request

from conductor.core.decisions import Reject
from conductor.core.machine import ConductorCore
from segue.limits import QUEUED_REQUESTS_MAX
from segue.manifest import Role


def test_the_queue_takes_its_maximum_and_not_one_more() -> None:
    core = ConductorCore()
    world = World(core)
    world.join("p1", Role.PREFILL)
    world.join("d1", Role.DECODE, max_num_seqs=1)
    number = 0
    while core.requests_queued == 0:
        world.submit(f"first-{number}")
        number += 1
    waiting = [request(f"r{number}") for number in range(QUEUED_REQUESTS_MAX - core.requests_queued)]
    assert all_of(Reject, core.step(1, waiting)) == []
    assert core.requests_queued == QUEUED_REQUESTS_MAX
    [reject] = all_of(Reject, core.step(2, [request("one more")]))
    assert (reject.key.request_id, reject.code, reject.resource) == ("one more", "overloaded", "queue")
    assert str(QUEUED_REQUESTS_MAX) in reject.message and reject.retry_after_ms > 0
    core.check()
