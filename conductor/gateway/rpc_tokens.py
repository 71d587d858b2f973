"""The TokenLink service: instances push token batches here; acknowledgements and cancels go back.

A batch is acknowledged by count, so one acknowledgement may cover many: at most one per ACK_INTERVAL_S unless there is
a cancel to tell, which goes at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc
from google.protobuf.message import DecodeError
from segue_proto.convert import (
    UnknownEnumValue,
    cancel_to_pb,
    finish_from_pb,
    logprobs_from_pb,
    ref_from_pb,
    scores_from_pb,
)
from segue_proto.v1 import worker_pb2

from conductor.gateway.request_table import RequestTable
from conductor.gateway.rpc_status import Context
from conductor.ports import ReceivedTokens
from conductor.rpc_version import refuse_other_versions
from segue.ids import InstanceRef
from segue.worker_messages import CancelAttempt

log = logging.getLogger(__name__)

SERVICE_NAME = "segue.v1.TokenLink"

ACK_INTERVAL_S = 0.05
"""A worker keeps unacknowledged batches for replay: 50 ms of them are a few."""

CANCELS_PER_ACK_MAX = 1024


class TokenLinkService:
    def __init__(self, table: RequestTable) -> None:
        self._table = table

    def handlers(self) -> grpc.GenericRpcHandler:
        push = grpc.stream_stream_rpc_method_handler(
            self.push,
            response_serializer=worker_pb2.TokenAck.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE_NAME, {"Push": push})

    async def push(self, batches: AsyncIterator[bytes], context: Context) -> AsyncIterator[worker_pb2.TokenAck]:
        await refuse_other_versions(context)
        inbox = _Acknowledger()
        reader = asyncio.create_task(self._read(batches, inbox))
        try:
            while (ack := await inbox.next()) is not None:
                yield ack
            if refusal := await reader:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, refusal)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, batches: AsyncIterator[bytes], inbox: _Acknowledger) -> str:
        """Reads until the instance closes, the connection breaks or it says what cannot be read; its requests live on
        elsewhere. Returns what was wrong with what it said, or ""."""
        try:
            async for raw in batches:
                inbox.received(self._deliver(worker_pb2.TokenBatch.FromString(raw)))
        except (DecodeError, UnknownEnumValue) as error:
            log.warning("a token stream is refused: %s", error)
            return f"TokenBatch: {error}"
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            log.info("a token stream broke")
        finally:
            inbox.close()
        return ""

    def _deliver(self, batch: worker_pb2.TokenBatch) -> list[CancelAttempt]:
        ref = ref_from_pb(batch.ref)
        cancels = []
        for delta in batch.deltas:
            cancel = self._table.on_tokens(_received(ref, batch.name, delta))
            if cancel is not None:
                cancels.append(cancel)
        return cancels


class _Acknowledger:
    """What is to be told to one instance."""

    def __init__(self) -> None:
        self._batches = 0
        self._acknowledged = 0
        self._cancels: list[CancelAttempt] = []
        self._closed = False
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()

    def received(self, cancels: list[CancelAttempt]) -> None:
        self._batches += 1
        self._changed.set()
        if cancels:
            self._cancels += cancels
            self._urgent.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()
        self._urgent.set()

    async def next(self) -> worker_pb2.TokenAck | None:
        await self._changed.wait()
        if not self._urgent.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), ACK_INTERVAL_S)
        if self._closed and self._acknowledged == self._batches and not self._cancels:
            return None
        told, self._cancels = self._cancels[:CANCELS_PER_ACK_MAX], self._cancels[CANCELS_PER_ACK_MAX:]
        if not self._closed and not self._cancels:
            self._changed.clear()
            self._urgent.clear()
        self._acknowledged = self._batches
        return worker_pb2.TokenAck(batches=self._batches, cancels=[cancel_to_pb(cancel) for cancel in told])


def _received(ref: InstanceRef, instance: str, delta: worker_pb2.TokenDelta) -> ReceivedTokens:
    logprobs = delta.logprobs
    return ReceivedTokens(
        ref=ref,
        instance=instance,
        request_id=delta.request_id,
        attempt=delta.attempt,
        position=delta.position,
        token_ids=delta.token_ids[:],
        logprobs=logprobs_from_pb(logprobs) if logprobs else None,
        finish=finish_from_pb(delta.finish),
        error=delta.error,
        tokens_cached=delta.tokens_cached,
        from_prefill=delta.from_prefill,
        queue_us=delta.queue_us,
        compute_us=delta.compute_us,
        scores=scores_from_pb(delta.scores) if delta.HasField("scores") else None,
    )
