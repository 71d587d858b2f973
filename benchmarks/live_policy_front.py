"""A Conductor + gateway process with a policy of the simulator: `python live_policy_front.py POLICY`, a FrontConfig as
JSON on stdin as for `conductor.app`. `segue` is the default core, as served."""

from __future__ import annotations

import asyncio
import signal
import sys
from functools import partial

import msgspec

from conductor.app import Endpoints, run
from conductor.core.beliefs import PRIOR_COST, Beliefs
from conductor.core.machine import ConductorCore
from conductor.core.settings import CoreSettings, make_core
from segue.config import FrontConfig, decode_config
from segue.cost_model import LinkCost
from simulator.policies import PolicyContext, make_policy


def core_with(policy: str, settings: CoreSettings) -> ConductorCore:
    if policy == "segue":
        return make_core(settings)
    cost = settings.cost or PRIOR_COST
    context = PolicyContext(cost=cost, link=LinkCost(latency_us=1_000.0, bytes_per_us=1_000.0))
    return ConductorCore(
        policy=make_policy(policy, context),
        models_known=settings.models_known,
        queue_max=settings.queue_max,
        beliefs=Beliefs(cost=cost),
        cost=settings.cost,
    )


async def serve(policy: str, config: FrontConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run(config, stop, announce, make=partial(core_with, policy))


def announce(endpoints: Endpoints) -> None:
    print(msgspec.json.encode({"ready": endpoints}).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], decode_config(sys.stdin.buffer.readline(), FrontConfig, "stdin")))
