"""One run from options to a summary: composition of target, prompts, workload and load."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec

from bench_client.alphabet import learn_alphabet
from bench_client.exchange import Clock, exchange
from bench_client.load import Extent, LoadRun, Send, warm_up
from bench_client.options import BenchOptions
from bench_client.prompts import Alphabet, PromptMaker
from bench_client.records import Exchange, PlannedRequest
from bench_client.replay import apply_replay
from bench_client.summary import Summary, summarise
from bench_client.target import BodyMaker, Model, Target
from bench_client.traces import Trace, read_trace
from bench_client.view import View
from bench_client.workload import arrivals, check_fits, from_trace, synthetic, too_long
from segue.errors import ConfigError

CONNECT_TIMEOUT_S = 10.0

WARMUP_CONCURRENCY = 4


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All that reports are made of."""

    model: str
    workload: str
    exchanges: list[Exchange]
    summary: Summary


class _Plan(msgspec.Struct, frozen=True, kw_only=True):
    requests: Iterator[PlannedRequest]
    total: int | None
    block_tokens: int
    describe: str


async def run(options: BenchOptions, api_key: str, view: View) -> Result:
    """Raises ConfigError before the load when something cannot work; afterwards everything is in the result."""
    trace = _read(options)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    async with httpx.AsyncClient(
        base_url=options.url,
        headers=headers,
        timeout=httpx.Timeout(options.timeout_s, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    ) as http:
        target = Target(http)
        model = await target.model(options.model)
        plan = _plan(options, trace, model)
        prompts = PromptMaker(await _alphabet(options, target, model), options.seed, plan.block_tokens)
        if options.endpoint == "chat" and not prompts.makes_text:
            raise ConfigError("--endpoint chat: words are no single tokens for this server; use --endpoint completions")
        return await _loaded(options, http, _bodies(options, model, prompts), plan, view, model)


async def _loaded(
    options: BenchOptions, http: httpx.AsyncClient, bodies: BodyMaker, plan: _Plan, view: View, model: Model
) -> Result:
    clock = Clock()

    def send(planned: PlannedRequest, due_us: int | None) -> asyncio.Future[Exchange]:
        return asyncio.ensure_future(exchange(http, bodies.path, bodies.body(planned), planned, clock, due_us))

    await _warm_up(options, send, view)
    extent = Extent(requests=options.requests, seconds=options.seconds, grace_s=options.grace_s)
    load = LoadRun(send, clock, extent, view.sent, view.done)
    with view.running(plan.total, options.seconds):
        try:
            await _drive(load, options, plan)
        except asyncio.CancelledError:
            if not load.exchanges:
                raise
            view.say("stopped early; the report covers what was sent")
    summary = summarise(load.exchanges, options.slo, load.lags_us)
    return Result(model=model.name, workload=plan.describe, exchanges=load.exchanges, summary=summary)


async def _drive(load: LoadRun, options: BenchOptions, plan: _Plan) -> None:
    if options.concurrency is not None:
        await load.closed_loop(plan.requests, options.concurrency)
    else:
        await load.open_loop(plan.requests)


async def _warm_up(options: BenchOptions, send: Send, view: View) -> None:
    """With prompts of their own, so that no counted request finds its prefix cached by them."""
    if not options.warmup:
        return
    planned = synthetic(options.tokens_input, options.tokens_output, options.seed)
    apart = (msgspec.structs.replace(one, index=-1 - one.index) for one in planned)
    with view.warming(options.warmup):
        answers = await warm_up(send, apart, options.warmup, options.concurrency or WARMUP_CONCURRENCY)
    failed = [answer for answer in answers if not answer.ok]
    if len(failed) == len(answers):
        raise ConfigError(f"every warm-up request failed: {failed[0].error}: {failed[0].detail}")


def _read(options: BenchOptions) -> Trace | None:
    return apply_replay(read_trace(Path(options.trace)), options.replay) if options.trace else None


def _plan(options: BenchOptions, trace: Trace | None, model: Model) -> _Plan:
    if trace is not None:
        return _trace_plan(options, trace, model)
    if model.context_tokens_max is not None:
        check_fits(options.tokens_input, options.tokens_output, model.context_tokens_max)
    requests = synthetic(options.tokens_input, options.tokens_output, options.seed)
    if options.rate is not None:
        times = arrivals(options.rate, options.arrival, options.seed)
        requests = (
            msgspec.structs.replace(planned, arrival_us=arrival_us)
            for planned, arrival_us in zip(requests, times, strict=False)
        )
    describe = f"synthetic prompts, input {options.tokens_input}, output {options.tokens_output} tokens"
    return _Plan(requests=requests, total=options.requests, block_tokens=0, describe=describe)


def _trace_plan(options: BenchOptions, trace: Trace, model: Model) -> _Plan:
    longer = too_long(trace, model.context_tokens_max) if model.context_tokens_max is not None else []
    if longer and not options.skip_too_long:
        raise ConfigError(
            f"--trace: {len(longer)} of {len(trace.rows)} requests are longer than the model's "
            f"{model.context_tokens_max} tokens; use --skip-too-long to leave them out, or --shrink"
        )
    skipped = set(longer)
    rows = [row for place, row in enumerate(trace.rows) if place not in skipped]
    if not rows:
        raise ConfigError("--trace: no request is left that fits the model")
    describe = f"{trace.kind} {trace.source}: {options.replay.describe()}"
    describe += f"; {len(longer)} of {len(trace.rows)} rows too long for the model left out" if longer else ""
    fitting = msgspec.structs.replace(trace, rows=rows)
    total = min(len(rows), options.requests or len(rows))
    requests = itertools.islice(from_trace(fitting), total)
    return _Plan(requests=requests, total=total, block_tokens=trace.block_tokens, describe=describe)


async def _alphabet(options: BenchOptions, target: Target, model: Model) -> Alphabet:
    if options.token_ids is not None:
        low, high = options.token_ids
        return Alphabet(tuple(range(low, high + 1)))
    return await learn_alphabet(lambda text: target.tokenize(model.name, text))


def _bodies(options: BenchOptions, model: Model, prompts: PromptMaker) -> BodyMaker:
    sampling = {"temperature": options.temperature, "seed": options.seed}
    if options.ignore_eos:
        sampling["ignore_eos"] = True
    return BodyMaker(prompts, endpoint=options.endpoint, model=model.name, sampling=sampling)
