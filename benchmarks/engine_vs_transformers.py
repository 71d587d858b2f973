"""The CPU engine beside `transformers.generate` in one process: same weights, same threads, runs alternating.

    python benchmarks/engine_vs_transformers.py [MODEL] [--only decode prefill prefix] [--threads 2] [--runs 5]
        [--clock wall|cpu] [--csv FILE]

MODEL is a llama-architecture GGUF file or directory, the demo model if left out. Values are medians over runs; `ratio`
is the engine's speed over the reference's, for `prefix hit` cold over cached time to the first token of the engine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from result_rows import ResultFile, cpu_device
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteriaList

from engine.engine import Engine, load_engine
from engine.parallel import Mesh
from engine.parameters import placements
from engine.weights.safetensors_dir import hugging_face_name
from launcher.demo_model import demo_model_path
from segue.config import EngineConfig, ModelConfig, SchedulerConfig
from segue.plan import BatchPlan, Chunk, RowStart
from segue.sampling_params import SamplingParams

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PARTS = ("decode", "prefill", "prefix")
PROMPT_TOKENS = 128
DECODE_TOKENS = 24
PREFILL_TOKENS = 1024
CHUNK_TOKENS = 512
SUFFIX_TOKENS = 16
BLOCK_SIZE = 16
ROW_PAGES = (PREFILL_TOKENS + SUFFIX_TOKENS) // BLOCK_SIZE + 2
ROWS = 8
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class EngineSide:
    """Drives the engine with hand-made plans; row r owns pages r * ROW_PAGES .. of the pool."""

    def __init__(self, path: str, threads: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        config = EngineConfig(device="cpu", threads=threads, block_size=BLOCK_SIZE, pages=ROWS * ROW_PAGES)
        self.engine: Engine = load_engine(ModelConfig(path=path), config, SchedulerConfig(max_num_seqs=ROWS))
        self.vocab = self.engine.card.vocab_size

    def run(self, **plan: object) -> None:
        self.engine.launch(BatchPlan(op=1, **plan))  # type: ignore[arg-type]
        self.engine.collect()

    def prefill_seconds(self, row: int, tokens: list[int], ready: int = 0) -> float:
        """Time to the first token with K/V of `ready` positions in the row's pages already."""
        pages = list(range(row * ROW_PAGES, (row + 1) * ROW_PAGES))
        starts = [RowStart(row, row, tokens, len(tokens), ready, pages, GREEDY)]
        began = self.clock()
        for start in range(ready, len(tokens), CHUNK_TOKENS):
            length = min(CHUNK_TOKENS, len(tokens) - start)
            self.run(starts=starts, chunks=[Chunk(row, start, length, start + length == len(tokens))])
            starts = []
        return self.clock() - began

    def cold_seconds(self, tokens: list[int], ready: int = 0) -> float:
        """`prefill_seconds` in row 0, which is free before and after."""
        seconds = self.prefill_seconds(0, tokens, ready)
        self.end([0])
        return seconds

    def end(self, rows: list[int]) -> None:
        self.run(ends=rows)

    def decode_seconds(self, batch: list[list[int]]) -> float:
        """Median seconds of a decode step after the prompts."""
        for row, tokens in enumerate(batch):
            self.prefill_seconds(row, tokens)
        rows = list(range(len(batch)))
        stamps = [self.clock()]
        for _ in range(DECODE_TOKENS):
            self.run(decodes=rows)
            stamps.append(self.clock())
        self.end(rows)
        return median_gap(stamps)


class TransformersSide:
    """Llama of transformers over copies of the engine's weights, with its default (SDPA) attention."""

    def __init__(self, side: EngineSide) -> None:
        self.clock = side.clock
        runner = side.engine._runner
        parameters = runner.model.parameters  # type: ignore[union-attr]
        spec = side.engine.info.spec
        config = LlamaConfig(
            vocab_size=spec.vocab_rows,
            hidden_size=spec.hidden,
            intermediate_size=spec.intermediate,
            num_hidden_layers=len(spec.layers),
            num_attention_heads=spec.heads,
            num_key_value_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            rms_norm_eps=spec.norm_eps,
            max_position_embeddings=spec.max_position,
            rope_parameters={"rope_type": "default", "rope_theta": spec.ropes[0].theta},
            tie_word_embeddings=spec.tied,
        )
        weights = {
            hugging_face_name(placement.kind, placement.layer, sandwich_norms=False): placement.target.contiguous()
            for placement in placements(spec, parameters, Mesh())
        }
        if spec.tied:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        with torch.device("meta"):
            self.model = LlamaForCausalLM(config)
        self.model.load_state_dict(weights, assign=True)
        self.model.model.rotary_emb = type(self.model.model.rotary_emb)(config)
        self.model.eval()

    def generate(self, batch: list[list[int]], tokens: int) -> list[float]:
        """Times at the start and after every token."""
        stamps = [self.clock()]

        def stamp(ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
            stamps.append(self.clock())
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        ids = torch.tensor(batch)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([stamp]),
        )
        return stamps

    def prefill_seconds(self, tokens: list[int]) -> float:
        stamps = self.generate([tokens], 1)
        return stamps[1] - stamps[0]

    def decode_seconds(self, batch: list[list[int]]) -> float:
        """Median seconds between tokens after the first."""
        return median_gap(self.generate(batch, DECODE_TOKENS + 1)[1:])


def median_gap(stamps: list[float]) -> float:
    return statistics.median(after - before for before, after in pairwise(stamps))


def alternating(ours: Callable[[], float], reference: Callable[[], float], runs: int) -> tuple[float, float]:
    """Medians of both over `runs` runs in turn, after one run of each that does not count."""
    ours(), reference()
    pairs = [(ours(), reference()) for _ in range(runs)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def prompt_tokens(generator: random.Random, vocab: int, length: int) -> list[int]:
    return generator.choices(range(vocab), k=length)


def measure_decode(
    ours: EngineSide, reference: TransformersSide, batch_size: int, runs: int, results: ResultFile
) -> None:
    generator = random.Random(batch_size)
    batch = [prompt_tokens(generator, ours.vocab, PROMPT_TOKENS) for _ in range(batch_size)]
    pair = alternating(lambda: ours.decode_seconds(batch), lambda: reference.decode_seconds(batch), runs)
    add_speeds(results, f"decode, batch {batch_size}, after {PROMPT_TOKENS}", batch_size, pair)


def measure_prefill(ours: EngineSide, reference: TransformersSide, runs: int, results: ResultFile) -> None:
    prompt = prompt_tokens(random.Random(0), ours.vocab, PREFILL_TOKENS)
    pair = alternating(lambda: ours.cold_seconds(prompt), lambda: reference.prefill_seconds(prompt), runs)
    add_speeds(results, f"prefill {PREFILL_TOKENS}", PREFILL_TOKENS, pair)


def measure_prefix_hit(ours: EngineSide, runs: int, results: ResultFile) -> None:
    """The pages of row 0 keep the prefix's K/V from the run before."""
    prompt = prompt_tokens(random.Random(1), ours.vocab, PREFILL_TOKENS + SUFFIX_TOKENS)
    cold, cached = alternating(
        lambda: ours.cold_seconds(prompt), lambda: ours.cold_seconds(prompt, ready=PREFILL_TOKENS), runs
    )
    shape = f"prefix hit {PREFILL_TOKENS} + {SUFFIX_TOKENS}"
    results.add(shape, "cold", cold * 1e3, "ms")
    results.add(shape, "cached", cached * 1e3, "ms")
    results.add(shape, "ratio", cold / cached, "x")


def add_speeds(results: ResultFile, shape: str, tokens: int, seconds: tuple[float, float]) -> None:
    results.add(shape, "engine", tokens / seconds[0], "tokens/s")
    results.add(shape, "transformers", tokens / seconds[1], "tokens/s")
    results.add(shape, "ratio", seconds[1] / seconds[0], "x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=None, help="default: the demo model")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: comparable with 1 thread on a busy machine"
    )
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "engine_cpu.csv")
    arguments = parser.parse_args()
    arguments.model = arguments.model or str(demo_model_path())
    torch.set_num_threads(arguments.threads)
    ours = EngineSide(arguments.model, arguments.threads, CLOCKS[arguments.clock])
    reference = TransformersSide(ours)
    command = (
        f"engine_vs_transformers {Path(arguments.model).stem} --threads {arguments.threads} --runs {arguments.runs}"
    )
    command += f" --clock {arguments.clock}"
    results = ResultFile(arguments.csv, device=cpu_device(arguments.threads), command=command)
    if "decode" in arguments.only:
        for batch_size in (1, ROWS):
            measure_decode(ours, reference, batch_size, arguments.runs, results)
    if "prefill" in arguments.only:
        measure_prefill(ours, reference, arguments.runs, results)
    if "prefix" in arguments.only:
        measure_prefix_hit(ours, arguments.runs, results)


if __name__ == "__main__":
    main()
