"""One contract for every mover. A mover joins by adding a maker to `mover_ends.MAKERS`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest
from mover_ends import ATTEMPT, MAKERS, PAGE_BYTES, PAGES, D, Ends, P

from kvstore.connectors.base import MOVERS, MoveDone, MoverError, mover_class
from kvstore.connectors.choice import check_connector
from kvstore.connectors.device_memory import HANDLE_BYTES
from kvstore.connectors.process_identity import pid_space, start_ticks, this_process
from segue.errors import ConfigError
from segue.handoff_messages import ProcessIdentity
from segue.ids import AttemptRef, InstanceRef


def another_process() -> ProcessIdentity:
    """This one's parent: local, alive, and not this one."""
    ticks = start_ticks(os.getppid())
    assert ticks is not None
    return ProcessIdentity(pid_space(), os.getppid(), ticks)


@pytest.fixture(params=sorted(MAKERS))
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = MAKERS[request.param]()
    yield made
    made.close()


def test_every_registered_mover_runs_this_contract() -> None:
    assert {"auto", *MOVERS} == set(MAKERS)


def test_pages_land_where_they_were_sent(ends: Ends) -> None:
    ends.connect()
    for page in range(PAGES):
        ends.fill(page, page + 1)
    ends.target.receive(P, ATTEMPT, [7, 0, 3])
    ends.source.send(1, D, ATTEMPT, [(1, 7), (2, 0), (6, 3)])
    assert ends.wait() == MoveDone(1, 3)
    assert [ends.at_target(page)[0] for page in range(PAGES)] == [3, 0, 0, 7, 0, 0, 0, 2]
    assert ends.at_target(7) == bytes([2]) * PAGE_BYTES


def test_blocks_that_the_target_has_are_skipped(ends: Ends) -> None:
    """The source's table has five blocks, the grant two pages for the last two of them."""
    ends.connect()
    for page in range(5):
        ends.fill(page, page + 1)
    ends.target.receive(P, ATTEMPT, [6, 2])
    ends.source.send(1, D, ATTEMPT, [(3, 6), (4, 2)])
    assert ends.wait() == MoveDone(1, 2)
    assert [ends.at_target(page)[0] for page in range(PAGES)] == [0, 0, 5, 0, 0, 0, 4, 0]


def test_every_op_ends_exactly_once_in_order(ends: Ends) -> None:
    ends.connect()
    ends.lend_all()
    for op in range(50):
        ends.source.send(op, D, ATTEMPT, [(op % PAGES, op % PAGES)])
    assert [done.op for done in ends.wait_all(50)] == list(range(50))
    assert ends.source.poll() == []


def test_page_sent_twice_lands_and_counts_twice(ends: Ends) -> None:
    ends.connect()
    ends.lend_all()
    ends.fill(1, 5)
    ends.source.send(1, D, ATTEMPT, [(1, 2)])
    ends.source.send(2, D, ATTEMPT, [(1, 2), (1, 3)])
    assert ends.wait_all(2) == [MoveDone(1, 1), MoveDone(2, 2)]
    assert (ends.at_target(2)[0], ends.at_target(3)[0]) == (5, 5)


def test_op_without_pages_ends(ends: Ends) -> None:
    ends.connect()
    ends.source.send(1, D, ATTEMPT, [])
    assert ends.wait() == MoveDone(1, 0)


def test_send_to_an_unregistered_peer_ends_with_an_error(ends: Ends) -> None:
    ends.source.send(1, D, ATTEMPT, [(0, 0)])
    done = ends.wait()
    assert done.moved == 0 and done.error


def test_page_out_of_range_moves_nothing(ends: Ends) -> None:
    ends.connect()
    ends.lend_all()
    ends.fill(0, 9)
    ends.source.send(1, D, ATTEMPT, [(0, 0), (0, PAGES)])
    done = ends.wait()
    assert done.moved == 0 and done.error
    assert ends.at_target(0)[0] == 0


def test_lending_to_an_unregistered_peer_is_an_error(ends: Ends) -> None:
    with pytest.raises(MoverError):
        ends.target.receive(P, ATTEMPT, [0])


def test_taking_back_from_an_unregistered_peer_is_none(ends: Ends) -> None:
    ends.target.receive(P, ATTEMPT, [])


def test_pages_taken_back_can_be_lent_to_the_next_attempt(ends: Ends) -> None:
    ends.connect()
    ends.lend_all()
    ends.target.receive(P, ATTEMPT, [])
    second = AttemptRef("r", 2)
    ends.target.receive(P, second, [4])
    ends.fill(0, 8)
    ends.source.send(1, D, second, [(0, 4)])
    assert ends.wait() == MoveDone(1, 1)
    assert ends.at_target(4)[0] == 8


def test_memory_of_somebody_else_is_refused(ends: Ends) -> None:
    ends.target.register(P, this_process(), [])
    forged = [msgspec.structs.replace(offer, nonce=bytes(len(offer.nonce))) for offer in ends.target.describe()]
    with pytest.raises(MoverError, match="nonce differs"):
        ends.source.register(D, this_process(), forged)


def test_memory_that_is_not_there_is_refused(ends: Ends) -> None:
    nowhere = f"1:{'00' * HANDLE_BYTES}:0:nowhere:0"
    places = {"shared_memory": "seguetest-nowhere", "tcp": "127.0.0.1:1", "cuda_ipc": nowhere}
    moved = [msgspec.structs.replace(offer, location=places[offer.mover]) for offer in ends.target.describe()]
    with pytest.raises(MoverError):
        ends.source.register(D, another_process(), moved)


def test_other_page_size_is_refused(ends: Ends) -> None:
    ends.target.register(P, this_process(), [])
    larger = [
        msgspec.structs.replace(offer, page_bytes=PAGE_BYTES * 2, pages=PAGES // 2) for offer in ends.target.describe()
    ]
    with pytest.raises(MoverError):
        ends.source.register(D, this_process(), larger)


def test_offer_of_another_mover_alone_is_refused(ends: Ends) -> None:
    (*_, offer) = ends.target.describe()
    with pytest.raises(MoverError):
        ends.source.register(D, this_process(), [msgspec.structs.replace(offer, mover="telepathy")])


def test_restarted_target_is_another_peer(ends: Ends) -> None:
    """The process at the old address is new: what was known of its predecessor moves nothing into it."""
    ends.connect()
    ends.source.forget(D)
    fresh = InstanceRef(D.uuid, D.incarnation + 1)
    ends.source.send(1, fresh, ATTEMPT, [(0, 0)])
    ends.source.send(2, D, ATTEMPT, [(0, 0)])
    assert [done.moved for done in ends.wait_all(2)] == [0, 0]
    assert ends.at_target(0)[0] == 0


def test_peer_that_is_met_again_can_be_sent_to(ends: Ends) -> None:
    ends.connect()
    ends.connect()
    ends.lend_all()
    ends.fill(0, 3)
    ends.source.send(1, D, ATTEMPT, [(0, 0)])
    assert ends.wait() == MoveDone(1, 1)
    assert ends.at_target(0)[0] == 3


def test_cancel_of_an_unknown_op_is_ignored(ends: Ends) -> None:
    ends.connect()
    ends.lend_all()
    ends.source.cancel(1)
    ends.source.send(1, D, ATTEMPT, [(0, 0)])
    assert ends.wait() == MoveDone(1, 1)


def test_cancelled_op_still_ends_once(ends: Ends) -> None:
    """A long first op is under way, so that the second is cancelled before it begins."""
    ends.connect()
    ends.lend_all()
    ends.source.send(1, D, ATTEMPT, [(0, 0), (1, 2)] * 20_000)
    ends.source.send(2, D, ATTEMPT, [(0, 1)])
    ends.source.cancel(2)
    ended = {done.op: done for done in ends.wait_all(2)}
    assert ended[2] == MoveDone(2, 0, "cancelled")
    assert ended[1] == MoveDone(1, 40_000)


def test_op_that_is_cancelled_under_way_says_what_landed(ends: Ends) -> None:
    ends.connect()
    ends.lend_all()
    ends.source.send(1, D, ATTEMPT, [(0, 0), (1, 2)] * 100_000)
    ends.source.cancel(1)
    done = ends.wait()
    assert done.moved < 200_000 and done.error == "cancelled"


def test_close_is_idempotent(ends: Ends) -> None:
    ends.connect()
    for mover in (ends.source, ends.target, ends.source, ends.target):
        mover.close()


def test_unknown_mover_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="shared_memory, tcp"):
        mover_class("telepathy")
    with pytest.raises(ConfigError, match="auto, cuda_ipc, shared_memory, tcp"):
        check_connector("telepathy")
