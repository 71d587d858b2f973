"""An instance is killed while pages of a long prompt travel, and a fresh one takes its slot: no token is wrong."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from kill_storm import until
from toy_cluster import InferenceStub, Stream, channel, follow, idle_within, request_of, toy_cluster, view

from worker_runtime.toy_engine import toy_tokens

PROMPT = [token % 997 for token in range(2_000)]
"""32 steps of a prefill instance; pages leave after each."""


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_slot_restarted_in_the_middle_of_a_transfer_gives_the_same_tokens(tmp_path: Path, victim: str) -> None:
    with toy_cluster(tmp_path, step_ms=30.0) as cluster:
        async with channel(cluster.grpc) as connection:
            stub, stream = InferenceStub(connection), Stream()
            client = asyncio.create_task(follow(stub, request_of(PROMPT, 20, seed=4), stream))
            async with asyncio.timeout(30):
                while not [one for one in (await view(stub)).instances if one.pages_active + one.pages_held > 50]:
                    await asyncio.sleep(0.01)
            assert not stream.tokens, "the transfer was over already"
            dead = cluster.pids()[victim]
            os.kill(dead, signal.SIGKILL)
            await client
            await until(lambda: pid if (pid := cluster.pids().get(victim, dead)) != dead else None)
            again = await follow(stub, request_of(PROMPT, 20, seed=4), Stream())
            await asyncio.sleep(1.0)
            assert await idle_within(stub, 1.0) is not None, "pages are still in use"
    assert stream.tokens == again.tokens == toy_tokens(PROMPT, 20, seed=4)
    assert stream.finished is not None
    assert stream.finished.attempts > 1
