"""Clients that send malformed requests to a running cluster and say what was wrong with an answer, if anything."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable

import grpc
import httpx
from fuzz_bytes import generate_request, http1_bytes, http2_bytes, http_request

SEND_S_MAX = 0.5
"""A mangled request may be a good one for 4,096 tokens: then its deadline ends it."""

READ_S_MAX = 0.03
ANSWERED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
}
"""The error table; INTERNAL and UNKNOWN would be our bug."""

BACKPRESSURE = (503, 504)


class Fuzzer:
    """`counts` has one entry for each kind of request and answer; `faults` whatever should not have been."""

    def __init__(self, grpc_address: str, http_address: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._channel = grpc.aio.insecure_channel(grpc_address, options=[("grpc.use_local_subchannel_pool", 1)])
        limits = httpx.Limits(max_connections=16, keepalive_expiry=2.0)  # the server hangs up after 5 s
        self._http = httpx.AsyncClient(base_url=f"http://{http_address}", trust_env=False, timeout=60, limits=limits)
        self._addresses = {"http1": http_address, "http2": grpc_address}

    async def aclose(self) -> None:
        await self._http.aclose()
        await self._channel.close()

    async def run(self, kind: str, count: int, parallel: int = 8) -> None:
        """`kind`: json, grpc, http1 or http2."""
        send: Callable[[], Awaitable[None]] = getattr(self, f"_{kind}")
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                await send()

        await asyncio.gather(*(worker() for _ in range(parallel)))

    async def _json(self) -> None:
        path, body = http_request(self.rng)
        headers = {"content-type": "application/json", "x-segue-deadline-ms": str(int(SEND_S_MAX * 1000))}
        answer = await self._http.post(path, content=body, headers=headers)
        self._note("json", answer.status_code, f"{path} {body!r}: {answer.text[:300]}")

    def _note(self, kind: str, status: int, what: str) -> None:
        self.counts[f"{kind} {status}"] += 1
        if status >= 500 and status not in BACKPRESSURE:
            self.faults.append(f"{status} {what}")

    async def _grpc(self) -> None:
        method = self.rng.choices(("Generate", "Cancel", "GetCluster"), (8, 1, 1))[0]
        data = generate_request(self.rng)
        call = self._channel.unary_stream(f"/segue.v1.Inference/{method}")(data, timeout=SEND_S_MAX)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError:
            pass
        code = await call.code()
        self.counts[f"grpc {code.name}"] += 1
        if code not in ANSWERED:
            self.faults.append(f"{code.name} {await call.details()} {method} {data!r}")

    async def _http1(self) -> None:
        answer = await self._raw("http1", http1_bytes(self.rng))
        status = re.match(rb"HTTP/1\.1 (\d{3})", answer)
        if status:
            self._note("http1", int(status[1]), repr(answer[:200]))
        else:
            self.counts["http1 left before an answer"] += 1

    async def _http2(self) -> None:
        await self._raw("http2", http2_bytes(self.rng))
        self.counts["http2 sent"] += 1

    async def _raw(self, kind: str, data: bytes) -> bytes:
        """What comes back within a moment; the connection is cut off then."""
        host, port = self._addresses[kind].rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        answer = b""
        try:
            writer.write(data)
            async with asyncio.timeout(READ_S_MAX):
                await writer.drain()
                answer = await reader.read(1024)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            writer.transport.abort()
        return answer
