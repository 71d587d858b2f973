"""Which mover a pair uses, and what that means for fences."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from mover_ends import ATTEMPT, PAGE_BYTES, D, Ends, P, probing_ends

from kvstore.connectors.base import MoveDone, MoverError
from kvstore.connectors.choice import ProbingMover, make_mover
from kvstore.connectors.process_identity import this_process
from segue.errors import ConfigError


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = probing_ends()
    yield made
    made.close()


def connect_without_shared_memory(ends: Ends) -> None:
    offers = ends.target.describe()
    ends.target.register(P, this_process(), [])
    ends.source.register(
        D, this_process(), [msgspec.structs.replace(offers[0], location="seguetest-nowhere"), *offers[1:]]
    )


def chosen(ends: Ends) -> list[str]:
    assert isinstance(ends.source, ProbingMover)
    return ends.source.chosen(D)


def test_shared_memory_is_offered_and_chosen_first(ends: Ends) -> None:
    assert [offer.mover for offer in ends.target.describe()] == ["shared_memory", "tcp"]
    ends.connect()
    assert chosen(ends) == ["shared_memory"]


def test_memory_that_is_not_shared_means_tcp(ends: Ends) -> None:
    connect_without_shared_memory(ends)
    assert chosen(ends) == ["tcp"]
    ends.fill(1, 6)
    ends.target.receive(P, ATTEMPT, [3])
    ends.source.send(1, D, ATTEMPT, [(1, 3)])
    assert ends.wait() == MoveDone(1, 1)
    assert ends.at_target(3)[0] == 6


def test_fence_is_proven_only_where_tcp_was_chosen(ends: Ends) -> None:
    ends.connect()
    assert not ends.target.fence(P)
    ends.target.forget(P)
    ends.source.forget(D)
    connect_without_shared_memory(ends)
    assert ends.target.fence(P) and ends.target.fence(P, ATTEMPT)


def test_peer_met_again_keeps_its_mover(ends: Ends) -> None:
    connect_without_shared_memory(ends)
    ends.connect()
    assert chosen(ends) == ["tcp"]


def test_every_reason_is_told_when_nothing_can_be_used(ends: Ends) -> None:
    offers = [msgspec.structs.replace(offer, nonce=b"") for offer in ends.target.describe()]
    with pytest.raises(MoverError, match=r"nonce differs.*;.*nonce differs"):
        ends.source.register(D, this_process(), offers)


def test_unknown_connector_is_a_config_error() -> None:
    memory = memoryview(bytearray(PAGE_BYTES))
    with pytest.raises(ConfigError, match="telepathy"):
        make_mover("telepathy", P, memory, PAGE_BYTES, segment=None, listen_host=None, on_done=lambda: None)
