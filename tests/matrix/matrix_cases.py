"""A tiny random Llama on disk, and an engine joined to a planner: everything below the network, on a CPU in float32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from engine.engine import Engine, load_engine
from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_pool import BlockPool
from segue.config import EngineConfig, ModelConfig, SchedulerConfig
from segue.sampling_params import SamplingParams

BLOCK_SIZE, PAGES, MODEL_LEN, VOCAB = 8, 160, 128, 96

torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    """One way to run the same requests."""

    caching: bool = False
    together: bool = False
    chunk: int = 512
    pages: int = PAGES
    depth: int = 0
    steps: int = 1


@dataclass
class Run:
    tokens: dict[int, list[int]] = field(default_factory=dict)
    preemptions: int = 0
    tokens_cached: int = 0
    chunks_partial: int = 0
    steps_max: int = 1
    in_flight_max: int = 0


def write_toy_model(folder: Path) -> None:
    """Wide initial weights: logits far apart, so that float32 rounding does not decide a token."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    torch.manual_seed(11)
    LlamaForCausalLM(config).save_pretrained(folder, safe_serialization=True)
    words = {f"t{index}": index for index in range(VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="t2")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "t0", "eos_token": "t1"}))


def run_requests(toy_path: Path, case: Case, requests: Sequence[tuple[list[int], SamplingParams]]) -> Run:
    """All requests through a fresh engine and planner, at once or one after the other."""
    scheduler = SchedulerConfig(
        max_num_seqs=16,
        max_num_batched_tokens=case.chunk,
        prefix_caching=case.caching,
        pipeline_depth=case.depth,
        steps_max=case.steps,
    )
    settings = EngineConfig(device="cpu", threads=1, block_size=BLOCK_SIZE, pages=PAGES)
    engine = load_engine(ModelConfig(path=str(toy_path)), settings, scheduler)
    pool = BlockPool(case.pages, BLOCK_SIZE, case.caching)
    limits = PlannerLimits(16, case.chunk, MODEL_LEN, case.depth, case.steps)
    planner = BatchPlanner(pool, limits, engine.card.eos_ids)
    result = Run()
    try:
        for seq, (prompt, sampling) in enumerate(requests):
            planner.add(seq, prompt, len(prompt), sampling, engine.kv_root, order=seq)
            result.tokens[seq] = []
            if not case.together:
                drain(planner, engine, result)
        drain(planner, engine, result)
    finally:
        engine.close()
    result.preemptions = planner.counts().preemptions
    counts = pool.counts()
    assert counts.free + counts.cached == counts.total
    return result


def drain(planner: BatchPlanner, engine: Engine, result: Run) -> None:
    """Run until nothing is left, with as many plans in flight as the planner gives."""
    in_flight = 0
    while planner.has_work():
        while (plan := planner.plan()) is not None:
            engine.launch(plan)
            in_flight += 1
            result.steps_max = max(result.steps_max, plan.steps_max)
            result.chunks_partial += sum(not chunk.sample for chunk in plan.chunks)
        result.in_flight_max = max(result.in_flight_max, in_flight)
        for update in planner.finished(engine.collect()):
            assert update.finish != "error", update.error
            result.tokens[update.seq] += update.tokens
            result.tokens_cached += update.tokens_cached if update.finish else 0
        in_flight -= 1
        planner.check()
