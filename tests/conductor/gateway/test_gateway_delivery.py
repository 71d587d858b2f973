"""Between a session and its client: what waits is merged, and what is sent says just that."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from segue_proto.v1 import inference_pb2

from conductor.gateway.hash_chain import HashChain
from conductor.gateway.live_request import LiveRequest
from conductor.gateway.rpc_views import DeltaEncoder, emit_to_pbs
from conductor.gateway.session import Session
from conductor.gateway.session_events import Emit, SessionSpec
from conductor.gateway.testing import toy_card
from conductor.gateway.text import TextCodec
from segue.plan import PromptScores, TokenLogprobs
from segue.sampling_params import SamplingParams

CODEC = TextCodec(toy_card())
SCORES = PromptScores(1, 0, [-1.0], [1], [], [])

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=4)
emits = st.builds(Emit, token_ids, st.text(max_size=5), st.none())


def live_request(**sampling: object) -> LiveRequest:
    spec = SessionSpec(
        request_id="r",
        model="toy",
        prompt_ids=b"\x01\x00\x00\x00" * 2,
        tokens_prompt=2,
        sampling=SamplingParams(max_tokens=99, **sampling),
        arrived_us=0,
    )
    session = Session(spec, CODEC.stream((), skip_special_tokens=True))
    return LiveRequest("r~1", session, HashChain(b"", 16), asyncio.Event(), None)


@given(st.lists(st.lists(emits, max_size=4), max_size=6))
def test_whatever_the_client_reads_it_reads_everything_once_in_order(reads: list[list[Emit]]) -> None:
    live, taken = live_request(), []
    for arrived in reads:
        for emit in arrived:
            live.put(emit)
        taken.append(live.take())
        assert (taken[-1] is None) == (not arrived)
        assert live.take() is None
    pieces = [emit for emit in taken if emit is not None]
    every = [emit for arrived in reads for emit in arrived]
    assert [token for piece in pieces for token in piece.token_ids] == [
        token for one in every for token in one.token_ids
    ]
    assert "".join(piece.text for piece in pieces) == "".join(one.text for one in every)


def test_merged_pieces_keep_their_log_probabilities_and_those_of_the_prompt() -> None:
    live = live_request(logprobs=0)
    entries = [TokenLogprobs(-0.5), TokenLogprobs(-1.5)]
    for emit in (Emit([], "", [], SCORES), Emit([1], "a", entries[:1]), Emit([2], "b", entries[1:])):
        live.put(emit)
    assert live.take() == Emit([1, 2], "ab", entries, SCORES)


@given(st.lists(emits, max_size=5))
def test_an_encoder_that_is_used_again_says_what_a_new_message_says(several: list[Emit]) -> None:
    encoder = DeltaEncoder()
    for emit in several:
        (message,) = emit_to_pbs(emit, b"", CODEC.token_text)
        assert inference_pb2.GenerateResponse.FromString(encoder.encode(emit)) == message
