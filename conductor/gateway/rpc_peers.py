"""Asking the other gateways of a cluster to cancel a request that may be theirs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
from segue_proto.v1 import inference_pb2, inference_pb2_grpc

from conductor.gateway.rpc_status import Context

log = logging.getLogger(__name__)

FORWARDED = ("segue-forwarded", "1")
"""Metadata of a call that a gateway makes for its client; such a call is not passed on again."""

PEER_S_MAX = 2.0


def is_forwarded(context: Context) -> bool:
    return FORWARDED in (tuple(entry) for entry in context.invocation_metadata() or ())


class PeerCancels:
    """`peers` gives the gRPC addresses of the other gateways. Cancels are rare: a connection lives for one call."""

    def __init__(self, peers: Callable[[], list[str]]) -> None:
        self._peers = peers

    async def cancel(self, request_id: str) -> bool:
        """Whether any of them had it. One that does not answer in time has none, as far as anybody can tell."""
        found = await asyncio.gather(*(self._cancel_at(peer, request_id) for peer in self._peers()))
        return any(found)

    async def _cancel_at(self, address: str, request_id: str) -> bool:
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                request = inference_pb2.CancelRequest(request_id=request_id)
                response = await stub.Cancel(request, metadata=(FORWARDED,), timeout=PEER_S_MAX)
                return bool(response.found)
        except grpc.aio.AioRpcError as error:
            log.warning("cancel of %s at %s: %s %s", request_id, address, error.code().name, error.details())
            return False
