"""Composition of one gateway: what `conductor.app` adds to its gRPC server and serves over HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import grpc
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from conductor.gateway import rpc_cluster, rpc_inference, rpc_tokens
from conductor.gateway.http_app import build_http_app
from conductor.gateway.http_completions import CompletionsApi
from conductor.gateway.http_service import ServiceApi
from conductor.gateway.intake import Intake
from conductor.gateway.metrics import ClusterCollector, RequestMetrics
from conductor.gateway.model_catalog import ModelCatalog
from conductor.gateway.openai_fields import FieldPolicy
from conductor.gateway.request_table import RequestTable
from conductor.gateway.rpc_cluster import ClusterService
from conductor.gateway.rpc_inference import InferenceService
from conductor.gateway.rpc_peers import PeerCancels
from conductor.gateway.rpc_tokens import TokenLinkService
from conductor.gateway.wall_clock import monotonic_us
from conductor.ports import ConductorPort, PoolPort
from conductor.tenant_limits import TenantLimiter
from segue.config import FrontConfig

TOKENIZE_THREADS = 2
"""Long prompts are tokenised beside the event loop; more threads would only take cores from it."""

SERVICE_NAMES = (rpc_inference.SERVICE_NAME, rpc_cluster.SERVICE_NAME, rpc_tokens.SERVICE_NAME)
"""For reflection and health."""


class Gateway:
    """Built by `build_gateway`; lives on one event loop from `start` to `close`."""

    def __init__(
        self,
        table: RequestTable,
        intake: Intake,
        inference: InferenceService,
        tokens: TokenLinkService,
        http_app: FastAPI,
        pool: ThreadPoolExecutor,
        metrics: RequestMetrics,
    ) -> None:
        self.table = table
        self._metrics = metrics
        self.http_app = http_app
        self._intake = intake
        self._inference = inference
        self._tokens = tokens
        self._pool = pool

    def add_to(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((self._inference.handlers(), self._tokens.handlers()))

    def add_scaling(self, server: grpc.aio.Server, pools: PoolPort) -> None:
        """Let operators change the sizes of the pools."""
        server.add_generic_rpc_handlers((ClusterService(pools, self._metrics).handlers(),))

    async def start(self, address: str) -> None:
        """`address` (host:port) is where workers reach the gRPC server that this gateway was added to."""
        self.table.address = address

    def share_tenant_secret(self, secret: bytes) -> None:
        """From now on prompts are hashed as the other gateways do it."""
        self._intake.tenant_secret = secret

    def refuse(self) -> None:
        """End live requests, and every new one, with UNAVAILABLE: their streams see it before the servers stop."""
        self._intake.catalog.close()
        self.table.close()

    async def close(self) -> None:
        self.refuse()
        self._pool.shutdown(wait=False, cancel_futures=True)


def build_gateway(
    config: FrontConfig,
    conductor: ConductorPort,
    *,
    tenant_secret: bytes | None = None,
    tenants: TenantLimiter | None = None,
    peers: Callable[[], list[str]] = list,
    collectors: Sequence[Collector] = (),
) -> Gateway:
    """`tenant_secret` keys the salts of tenants' block hashes; without one, tenants share nothing across gateways.
    `peers` are the other gateways' gRPC addresses, `collectors` metrics to show beside the gateway's own."""
    pool = ThreadPoolExecutor(TOKENIZE_THREADS, thread_name_prefix="gateway-text")
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    tenants = tenants or TenantLimiter(config.tenants, "gateway", monotonic_us)
    table = RequestTable(conductor, monotonic_us, metrics, tenants.end)
    for collector in (ClusterCollector(conductor.cluster, table.counts), *collectors):
        registry.register(collector)
    catalog = ModelCatalog(conductor, pool, config.model_names)
    intake = Intake(catalog, table, pool, tenants, tenant_secret or secrets.token_bytes(32))
    own_version = version("segue")
    http_app = build_http_app(
        CompletionsApi(intake, metrics, FieldPolicy(strict=config.strict_fields)),
        ServiceApi(intake, registry, own_version),
        metrics,
    )
    inference = InferenceService(intake, conductor, metrics, own_version, PeerCancels(peers))
    return Gateway(table, intake, inference, TokenLinkService(table), http_app, pool, metrics)
