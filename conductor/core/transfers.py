"""What hand-offs tell of the links: from the outcomes of both sides, how long the pages of a prompt took to move.

Pages go as they are computed. So when P is done, what remains is the last chunk, or what the link was too slow for, and
the tail until D has every page is the longer of the two. Turned around, the link is as fast as the faster of: the last
chunk in the tail, everything that D lacked in the tail and the computation. Both sides' reports and messages are in the
tail too, a few milliseconds that only large transfers can tell from the moving: those are the ones that weigh.

A prefix that is fetched before a prefill is reported by nobody; its link is believed to be like those of hand-offs.
"""

from __future__ import annotations

from conductor.core.events import RequestArrived
from conductor.core.links import LinkBook
from conductor.core.policy import Choice
from segue.ids import AttemptRef
from segue.worker_messages import OutcomeKind


class _Transfer:
    __slots__ = ("bytes_lacking", "bytes_last", "done_us", "source", "started_us", "target")

    def __init__(self, choice: Choice, tokens_known: int) -> None:
        source = choice.prefill
        assert source is not None, "only what P computes is handed over"
        token_bytes = source.manifest.layout.page_bytes / source.block_size
        lacking = tokens_known - choice.held_decode
        self.source, self.target = source.uuid, choice.decode.uuid
        self.bytes_lacking = lacking * token_bytes
        self.bytes_last = min(lacking, source.manifest.max_num_batched_tokens, choice.tokens_compute) * token_bytes
        self.started_us: int | None = None
        self.done_us: int | None = None


class TransferWatch:
    """Every attempt that is routed with a prefill instance, until it is handed over or has ended."""

    def __init__(self, links: LinkBook) -> None:
        self._links = links
        self._live: dict[AttemptRef, _Transfer] = {}

    def __len__(self) -> int:
        return len(self._live)

    def routed(self, request: RequestArrived, choice: Choice) -> None:
        if choice.prefill is not None and choice.tokens_compute:
            self._live[request.key] = _Transfer(choice, request.tokens_known)

    def report(self, key: AttemptRef, kind: OutcomeKind, now_us: int) -> None:
        """One outcome of either side. Where the reports of P are missing, or come last, nothing is learned."""
        transfer = self._live.get(key)
        if transfer is None:
            return
        match kind:
            case OutcomeKind.PREFILL_STARTED:
                transfer.started_us = now_us
            case OutcomeKind.PREFILL_DONE:
                transfer.done_us = now_us
            case OutcomeKind.HANDOFF_COMPLETE:
                self._learn(transfer, now_us)
                del self._live[key]

    def ended(self, key: AttemptRef) -> None:
        self._live.pop(key, None)

    def _learn(self, transfer: _Transfer, now_us: int) -> None:
        if transfer.started_us is None or transfer.done_us is None:
            return
        tail_us, whole_us = now_us - transfer.done_us, now_us - transfer.started_us
        last, lacking = (transfer.bytes_last, tail_us), (transfer.bytes_lacking, whole_us)
        size_bytes, elapsed_us = max(last, lacking, key=lambda pair: pair[0] / max(pair[1], 1))
        self._links.note(transfer.source, transfer.target, size_bytes, elapsed_us)
