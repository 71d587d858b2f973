"""The Cluster service: operators change the size of a pool and watch it happen."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from segue_proto.v1 import cluster_pb2

from conductor.gateway.metrics import RequestMetrics
from conductor.gateway.rpc_inference import parse, serialize
from conductor.gateway.rpc_status import Context, errors_to_status
from conductor.ports import PoolPort
from segue.pool_messages import InstanceChange, ScaleDone

SERVICE_NAME = cluster_pb2.DESCRIPTOR.services_by_name["Cluster"].full_name


class ClusterService:
    def __init__(self, pools: PoolPort, metrics: RequestMetrics) -> None:
        self._pools = pools
        self._metrics = metrics

    def handlers(self) -> grpc.GenericRpcHandler:
        scale = grpc.unary_stream_rpc_method_handler(self.scale)
        return grpc.method_handlers_generic_handler(SERVICE_NAME, {"Scale": scale})

    async def scale(self, body: bytes, context: Context) -> AsyncIterator[bytes]:
        async with errors_to_status(context, self._metrics):
            request = parse(body, cluster_pb2.ScaleRequest)
            async for event in self._pools.scale(request.pool, request.instances):
                yield serialize(_event_to_pb(event))


def _event_to_pb(event: InstanceChange | ScaleDone) -> cluster_pb2.ScaleEvent:
    if isinstance(event, ScaleDone):
        return cluster_pb2.ScaleEvent(done=cluster_pb2.ScaleDone(instances=event.instances))
    change = cluster_pb2.InstanceChange(name=event.name, state=event.state.value, reason=event.reason)
    return cluster_pb2.ScaleEvent(change=change)
