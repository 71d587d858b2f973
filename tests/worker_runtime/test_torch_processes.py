"""Real P and D processes on the torch engine with a small random Llama: the tokens of the engine run in one process."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from front_rig import Front, WorkerProcess, real_command, worker_config
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from engine.engine import load_engine
from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_pool import BlockPool
from segue.config import EngineConfig, ModelConfig, SchedulerConfig
from segue.manifest import Role
from segue.plan import TokenLogprobs
from segue.sampling_params import SamplingParams

VOCAB = 97
ENGINE = EngineConfig(device="cpu", pages=64, block_size=8, threads=1)
SCHEDULER = SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_k=20, seed=11, max_tokens=10, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder, safe_serialization=True)
    Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, "w0")).save(
        str(folder / "tokenizer.json")
    )
    return folder


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in (1, 7, 8, 9, 31, 64, 90)]


def alone(
    model_path: Path, prompt: list[int], sampling: SamplingParams, config: EngineConfig = ENGINE
) -> tuple[list[int], list[TokenLogprobs]]:
    """The same request on an engine of this process, nothing handed over: its tokens and their log-probabilities."""
    engine = load_engine(ModelConfig(path=str(model_path)), config, SCHEDULER)
    pool = BlockPool(engine.pages_total, engine.layout.block_size)
    planner = BatchPlanner(pool, PlannerLimits(8, 24, engine.card.max_model_len), engine.card.eos_ids)
    planner.add(1, prompt, len(prompt), sampling, engine.kv_root, order=1)
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    while (plan := planner.plan()) is not None:
        engine.launch(plan)
        for update in planner.finished(engine.collect()):
            tokens += update.tokens
            logprobs += update.logprobs or []
    engine.close()
    return tokens, logprobs


def pair(
    front: Front, model_path: Path, runtime_dir: Path, engine: EngineConfig, schedulers: list[SchedulerConfig]
) -> list[WorkerProcess]:
    """P and D."""
    return [
        WorkerProcess(
            worker_config(
                front,
                role,
                runtime_dir,
                model=ModelConfig(path=str(model_path), name="llama"),
                engine=engine,
                scheduler=scheduler,
            ),
            real_command(role),
        )
        for role, scheduler in zip((Role.PREFILL, Role.DECODE), schedulers, strict=True)
    ]


async def test_handed_off_tokens_equal_those_of_one_process(model_path: Path, tmp_path: Path) -> None:
    front = Front()
    await front.start()
    workers = pair(front, model_path, tmp_path, ENGINE, [SCHEDULER, SCHEDULER])
    for worker in workers:
        await worker.start()
    for worker in workers:
        await worker.ready()
    requests = [(prompt, sampling) for prompt in prompts() for sampling in (GREEDY, SEEDED)]
    keys = [
        front.submit(f"r{number}", prompt, sampling, prefill="prefill-0", decode="decode-0")
        for number, (prompt, sampling) in enumerate(requests)
    ]
    await front.until(lambda: all(front.finish(key) for key in keys))
    for key, (prompt, sampling) in zip(keys, requests, strict=True):
        assert front.generated(key) == alone(model_path, prompt, sampling)[0]
    assert [await worker.stop() for worker in workers] == [0, 0]
    await front.close()


async def test_batch_invariant_pairs_give_the_bits_of_one_process(model_path: Path, tmp_path: Path) -> None:
    """P computes in small chunks, D many rows at a time; the one process has whole prompts and one row."""
    front = Front()
    await front.start()
    engine = msgspec.structs.replace(ENGINE, batch_invariant=True)
    chunks = msgspec.structs.replace(SCHEDULER, max_num_batched_tokens=10)
    workers = pair(front, model_path, tmp_path, engine, [chunks, SCHEDULER])
    for worker in workers:
        await worker.start()
    for worker in workers:
        await worker.ready()
    keys = [
        front.submit(f"r{number}", prompt, SEEDED, prefill="prefill-0", decode="decode-0")
        for number, prompt in enumerate(prompts())
    ]
    await front.until(lambda: all(front.finish(key) for key in keys))
    for key, prompt in zip(keys, prompts(), strict=True):
        reported = [entry for delta in front.deltas[key] for entry in delta.logprobs or []]
        assert (front.generated(key), reported) == alone(model_path, prompt, SEEDED, engine)
    assert [await worker.stop() for worker in workers] == [0, 0]
    await front.close()
