"""Token ids of a workload's prompts: equal prefix ids give equal tokens, different ids different ones.

The production cores hash tokens, so a trace of prefix ids has to become tokens. A span spells its id in its first
tokens, a byte each, and is zero beyond: token ids stay below 256, which CPython keeps ready made; with ordinary ids the
lists of a one-hour trace would cost more time than all decisions about it.
"""

from __future__ import annotations

from simulator.workload import Workload

ID_BYTES = 8
SPAN_TOKENS_MIN = ID_BYTES
EOS = 255
"""Ends a sequence when it is sampled; in a prompt it means nothing."""

PRIVATE_IDS = 1 << 40
"""Ids of prompts that share nothing start here, beyond those of any trace."""


class PromptTokens:
    """Little-endian u32 token ids of each request of one workload."""

    def __init__(self, workload: Workload) -> None:
        self._requests = workload.requests
        self._span_tokens = workload.span_tokens
        self._private_spans = max((-(-r.tokens_prompt // workload.span_tokens) for r in workload.requests), default=1)

    def token_ids(self, index: int) -> bytes:
        """The prompt of request `index`: 4 bytes a token."""
        request = self._requests[index]
        size = self._span_tokens
        count = -(-request.tokens_prompt // size)
        first = PRIVATE_IDS + index * self._private_spans
        ids = list(request.prefix_ids)
        # A trace may name full spans only: the partial tail is the request's own.
        ids += [first + place for place in range(len(ids), count)]
        return b"".join(_span(span_id, size) for span_id in ids)[: request.tokens_prompt * 4]


def _span(span_id: int, size: int) -> bytes:
    span = bytearray(size * 4)
    digits = span_id.to_bytes(ID_BYTES, "little")
    span[: ID_BYTES * 4 : 4] = digits
    return bytes(span)
