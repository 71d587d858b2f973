"""The engine on one GPU, driven through BatchPlanner and Engine in this process; Llama-3.1-8B shape, random weights.

    PYTHONPATH=.:kernels:proto python -m benchmarks.gpu_engine [--cases start,single,decode,...] [--results FILE]

Stamps are taken where results arrive on the host. Decode cases land sequences with random K/V instead of computing
their prompts; a step's time is the median distance between results at pipeline depth 1 while all rows decode.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.result_rows import RESULTS, ResultFile
from engine.cuda.random_model import llama_8b_spec, random_model
from engine.engine import Engine, load_engine
from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_pool import BlockPool
from segue.config import EngineConfig, ModelConfig, SchedulerConfig
from segue.sampling_params import SamplingParams

BLOCK, PAGES, LENGTH_MAX, BUDGET_TOKENS, ROWS, SATURATING = 64, 11_776, 34_816, 16_384, 512, 2560
ROOT = b"benchmark"


@dataclass(slots=True)
class Stamps:
    """When one sequence was added and when its tokens arrived."""

    added_s: float
    arrived_s: list[float] = field(default_factory=list)

    @property
    def first_ms(self) -> float:
        return (self.arrived_s[0] - self.added_s) * 1e3

    @property
    def per_token_ms(self) -> float:
        return (self.arrived_s[-1] - self.arrived_s[0]) / (len(self.arrived_s) - 1) * 1e3


class Bench:
    """One engine and one planner for all cases; token ids are random, so nothing hits the cache by chance."""

    def __init__(self, *, quantization: str = "", kv_dtype: str = "auto") -> None:
        started_s = time.perf_counter()
        device = torch.device("cuda")
        info = random_model(
            llama_8b_spec(),
            dtype=torch.bfloat16,
            device=device,
            block_size=BLOCK,
            pages_total=PAGES,
            max_model_len=LENGTH_MAX,
            kv_dtype=torch.float8_e4m3fn if kv_dtype == "fp8" else None,
        )
        scheduler = SchedulerConfig(max_num_seqs=ROWS, max_num_batched_tokens=BUDGET_TOKENS, pipeline_depth=1)
        prefill = "triton" if kv_dtype == "fp8" else "cudnn"
        config = EngineConfig(device="cuda", attention_prefill=prefill, attention_decode="triton")
        model = ModelConfig(path="random", quantization=quantization)
        self.engine: Engine = load_engine(model, config, scheduler, info=info)
        torch.cuda.synchronize()
        self.load_s = time.perf_counter() - started_s
        limits = PlannerLimits(ROWS, BUDGET_TOKENS, LENGTH_MAX, pipeline_depth=1, tokens_saturating=SATURATING)
        self.planner = BatchPlanner(BlockPool(PAGES, BLOCK), limits, eos_ids=())
        self.rng = random.Random(1)
        self.seqs = 0
        self.stamps: dict[int, Stamps] = {}
        self.results_s: list[float] = []
        self.host_s: list[float] = []
        """Host work of each plan: planning, launching and taking in a result."""
        self._flights: deque[int] = deque()

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1000, 120_000) for _ in range(count)]

    def add(self, prompt: list[int], new_tokens: int) -> int:
        """Queue a prompt to be computed."""
        self.seqs += 1
        self.stamps[self.seqs] = Stamps(time.perf_counter())
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        self.planner.add(self.seqs, prompt, len(prompt), sampling, ROOT, order=self.seqs)
        return self.seqs

    def land(self, context: int, new_tokens: int) -> int:
        """A sequence whose K/V is there already (whatever the pages hold)."""
        self.seqs += 1
        self.stamps[self.seqs] = Stamps(time.perf_counter())
        prompt = self.tokens(context)
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        reservation = self.planner.reserve(self.seqs, context, [])
        assert reservation is not None, "the pool is full"
        self.planner.land(self.seqs, prompt, context, sampling, ROOT, reservation, context - 1, order=self.seqs)
        return self.seqs

    def run(self) -> None:
        """Until everything has finished."""
        self.results_s, self.host_s = [], []
        while self.planner.has_work() or self._flights:
            self.turn()

    def turn(self) -> None:
        """Launch ahead, then take in one result."""
        started_s = time.perf_counter()
        while (plan := self.planner.plan()) is not None:
            self.engine.launch(plan)
            self._flights.append(plan.op)
        planned_s = time.perf_counter()
        self._flights.popleft()
        result = self.engine.collect()
        arrived_s = time.perf_counter()
        for update in self.planner.finished(result):
            self.stamps[update.seq].arrived_s.extend([arrived_s] * len(update.tokens))
        self.results_s.append(arrived_s)
        self.host_s.append(planned_s - started_s + time.perf_counter() - arrived_s)

    def step_ms(self) -> float:
        """Median distance between results, without the first and last steps."""
        gaps = [(b - a) * 1e3 for a, b in zip(self.results_s[3:-2], self.results_s[4:-1], strict=False)]
        return statistics.median(gaps)


Rows = Iterator[tuple[str, str, float, str]]
"""shape, metric, value, unit"""


def start(bench: Bench) -> Rows:
    yield f"all batch sizes to {ROWS}", "load", bench.load_s, "s"
    first = bench.add(bench.tokens(128), 2)
    bench.run()
    yield "128 tokens, first of all", "ttft", bench.stamps[first].first_ms, "ms"


def single(bench: Bench) -> Rows:
    values = []
    for _ in range(4):
        seq = bench.add(bench.tokens(128), 256)
        bench.run()
        values.append(bench.stamps[seq].per_token_ms)
    yield "1 x 128 -> 256", "tpot", statistics.median(values[1:]), "ms"


def decode(bench: Bench) -> Rows:
    for count, context in (
        (1, 1024),
        (8, 1024),
        (32, 1024),
        (64, 1024),
        (128, 1024),
        (256, 1024),
        (64, 8192),
        (16, 32768),
    ):
        for _ in range(count):
            bench.land(context, 40)
        bench.run()
        yield f"{count} x {context}", "step", bench.step_ms(), "ms"
        if count == 256:
            yield f"{count} x {context}", "host work", statistics.median(bench.host_s[3:-2]) * 1e3, "ms"


def prefill(bench: Bench) -> Rows:
    for length in (1024, 4096, 16_384, 32_768):
        values = []
        for _ in range(4):
            seq = bench.add(bench.tokens(length), 1)
            bench.run()
            values.append(bench.stamps[seq].first_ms)
        yield f"1 x {length}", "ttft", statistics.median(values[1:]), "ms"


def cached(bench: Bench) -> Rows:
    prefix = bench.tokens(8192)
    bench.add(prefix, 1)
    bench.run()
    values = []
    for _ in range(6):
        seq = bench.add(prefix + bench.tokens(128), 1)
        bench.run()
        values.append(bench.stamps[seq].first_ms)
    yield "128 on 8192 cached", "ttft", statistics.median(values[1:]), "ms"


def shared(bench: Bench) -> Rows:
    for _ in range(2):
        prefix = bench.tokens(8192)
        seqs = [bench.add(prefix + bench.tokens(128), 32) for _ in range(64)]
        bench.run()
        mean_ms = statistics.mean(bench.stamps[seq].first_ms for seq in seqs)
    yield "64 at once sharing 8192, cold", "mean ttft", mean_ms, "ms"


def offline(bench: Bench) -> Rows:
    """The second of two runs: the first builds execution plans for new chunk lengths."""
    for _ in range(2):
        rng = random.Random(7)
        shapes = [(rng.randint(128, 2048), rng.randint(32, 512)) for _ in range(512)]
        started_s = time.perf_counter()
        for length, new_tokens in shapes:
            bench.add(bench.tokens(length), new_tokens)
        bench.run()
    yield "512 requests", "elapsed", time.perf_counter() - started_s, "s"


CASES: dict[str, Callable[[Bench], Rows]] = {
    "start": start,
    "single": single,
    "decode": decode,
    "prefill": prefill,
    "cached": cached,
    "shared": shared,
    "offline": offline,
}


def profile(bench: Bench, folder: Path) -> None:
    """Kernel times of steady decode steps and of one prefill, as text tables in `folder`."""
    for name, count, context in (("decode_1", 1, 1024), ("decode_8", 8, 1024), ("decode_64", 64, 1024)):
        for _ in range(count):
            bench.land(context, 12)
        _profile(bench, folder / f"profile_{name}.txt", skip=4)
    for length in (1024, 16_384):
        bench.add(bench.tokens(length), 1)
        _profile(bench, folder / f"profile_prefill_{length}.txt", skip=0)


def _profile(bench: Bench, path: Path, skip: int) -> None:
    for _ in range(skip):
        bench.turn()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        bench.run()
        torch.cuda.synchronize()
    averages = profiler.key_averages()
    path.write_text(averages.table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--results", type=Path, default=RESULTS / "gpu_engine_h200.csv")
    parser.add_argument("--profile", type=Path, help="folder for kernel tables")
    options = parser.parse_args()
    bench = Bench()
    bench.engine.pages.view(torch.int16).random_(0x3C00, 0x3FC0)  # bfloat16 between 0.008 and 1.5
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    results = ResultFile(options.results, device=device, command="gpu_engine")
    for name in options.cases.split(","):
        for row in CASES[name](bench):
            results.add(*row)
    if options.profile is not None:
        profile(bench, options.profile)


if __name__ == "__main__":
    main()
