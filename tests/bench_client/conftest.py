"""A server under load: the gateway, with scripted instances, behind real HTTP; its helpers live with its own tests."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "conductor" / "gateway"))

from bench_answers import full_answer
from gateway_front import Front, serving  # found through the line above

from conductor.gateway.testing import FakeConductor, Script, toy_card
from conductor.ports import RoutedRequest
from segue.config import FrontConfig

DATA = Path(__file__).parent / "data"

StartServer = Callable[..., Awaitable[Front]]


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    """`await start_server(reply)`: a front whose `http_url` answers; stopped after the test."""
    async with AsyncExitStack() as stack:

        async def start(reply: Callable[[RoutedRequest], Script] = full_answer, *, max_model_len: int = 4096) -> Front:
            conductor = FakeConductor([toy_card(max_model_len=max_model_len)], reply)
            return await stack.enter_async_context(serving(conductor, FrontConfig(model_names=("toy",))))

        yield start


@pytest.fixture
def data() -> Path:
    return DATA
