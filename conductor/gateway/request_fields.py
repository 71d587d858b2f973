"""What a client asked for, as both front doors hand it to validation: None where the client said nothing."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from segue.sampling_params import SamplingParams


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """`names` maps our names to the client's where they differ, so that an error speaks of the field that was sent."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: Sequence[int] | None = None
    stop: Sequence[str] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    names: Mapping[str, str] = {}

    def name_of(self, field: str) -> str:
        return self.names.get(field, field)


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    vocab_size: int
    max_model_len: int


class CheckedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Within every limit. `prompt_ids` is little-endian u32."""

    prompt_ids: bytes
    tokens_prompt: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    skip_special_tokens: bool


def with_sampling(checked: CheckedRequest, **changes: int | None) -> CheckedRequest:
    return replace(checked, sampling=replace(checked.sampling, **changes))


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Little-endian u32, the form in which ids cross process boundaries. Ids must be in 0 .. 2^32-1."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    ids = array("I")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
