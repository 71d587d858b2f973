"""`start`: a gateway in front of a FakeConductor, stopped after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from gateway_front import Front, saying, serving

from conductor.gateway.testing import FakeConductor, Script, toy_card
from conductor.ports import RoutedRequest
from segue.config import FrontConfig


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[Front]]]:
    """Start a front: `await start(reply)`; everything is stopped after the test."""
    async with AsyncExitStack() as stack:

        async def start_front(
            reply: Callable[[RoutedRequest], Script] | None = None, *, strict_fields: bool = False, **options: object
        ) -> Front:
            conductor = FakeConductor([toy_card()], reply or saying("hello world"), **options)
            config = FrontConfig(strict_fields=strict_fields, model_names=("toy", "later"))
            return await stack.enter_async_context(serving(conductor, config))

        yield start_front
