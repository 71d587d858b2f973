"""Batch plans executed exactly as segue.plan says, on a small random model on the CPU."""

import mmap
import random
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import VOCAB, family_configs, reference_logits, write_checkpoint

from engine.engine import Engine, load_engine, read_model
from engine.runner import ROW_FAILED
from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_pool import BlockPool
from segue.config import EngineConfig, ModelConfig, SchedulerConfig
from segue.errors import ConfigError, InternalError
from segue.plan import BatchPlan, Chunk, RowStart
from segue.sampling_params import SamplingParams

BLOCK = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = random.Random(1).choices(range(250), k=21)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, object]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, write_checkpoint(family_configs()["llama"], directory)


def engine_for(path: Path, pages: int = 64, **scheduler: int) -> Engine:
    config = EngineConfig(device="cpu", block_size=BLOCK, pages=pages)
    return load_engine(ModelConfig(path=str(path)), config, SchedulerConfig(max_num_seqs=8, **scheduler))


@pytest.fixture
def engine(checkpoint) -> Engine:
    return engine_for(checkpoint[0], pipeline_depth=1, steps_max=8)


def greedy_reference(model, prompt: list[int], count: int, vocab: int = 257) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1, :vocab].argmax()))
    return tokens[len(prompt) :]


def start(row: int, prompt: list[int], pages: list[int], sampling: SamplingParams = GREEDY, ready: int = 0) -> RowStart:
    return RowStart(row, 70 + row, prompt, len(prompt), ready, pages, sampling)


def run(engine: Engine, **plan) -> list:
    engine.launch(BatchPlan(op=1, **plan))
    return engine.collect().rows


def test_greedy_text_equals_the_reference(checkpoint, engine):
    out = run(engine, starts=[start(3, PROMPT, [9, 2, 30, 4, 5, 6])], chunks=[Chunk(3, 0, 10, False)])
    assert out == []
    out = run(engine, chunks=[Chunk(3, 10, 11, True)])
    tokens = out[0].tokens
    for step in range(9):
        grows = [(3, [40 + step])] if (21 + step) // BLOCK >= 6 else []
        tokens += run(engine, grows=grows, decodes=[3])[0].tokens
    assert tokens == greedy_reference(checkpoint[1], PROMPT, 10)


def test_result_names_row_and_sequence(engine):
    engine.launch(BatchPlan(op=41, starts=[start(2, PROMPT, list(range(8)))], chunks=[Chunk(2, 0, 21, True)]))
    result = engine.collect()
    assert (result.op, result.steps, result.rows[0].row, result.rows[0].seq) == (41, 1, 2, 72)


def test_depth_one_uses_the_token_the_host_has_not_seen(checkpoint, engine):
    engine.launch(BatchPlan(op=1, starts=[start(0, PROMPT, list(range(8)))], chunks=[Chunk(0, 0, 21, True)]))
    engine.launch(BatchPlan(op=2, decodes=[0]))
    engine.launch(BatchPlan(op=3, decodes=[0]))
    results = [engine.collect() for _ in range(3)]
    assert [result.op for result in results] == [1, 2, 3]
    assert [result.rows[0].tokens[0] for result in results] == greedy_reference(checkpoint[1], PROMPT, 3)


def test_many_steps_in_one_plan_equal_single_steps(checkpoint, engine):
    rows = [start(0, PROMPT, list(range(10))), start(1, PROMPT[:7], list(range(20, 30)))]
    run(engine, starts=rows, chunks=[Chunk(0, 0, 21, True), Chunk(1, 0, 7, True)])
    engine.launch(BatchPlan(op=2, decodes=[1, 0], steps_max=6))
    result = engine.collect()
    assert result.steps == 6
    assert result.rows[0].tokens == greedy_reference(checkpoint[1], PROMPT[:7], 7)[1:]
    assert result.rows[1].tokens == greedy_reference(checkpoint[1], PROMPT, 7)[1:]


def test_cached_prefix_pages_are_reused(checkpoint, engine):
    run(engine, starts=[start(0, PROMPT, [0, 1, 2, 3, 4, 5])], chunks=[Chunk(0, 0, 21, True)])
    other = [*PROMPT[:12], 7, 8, 9]
    row = start(1, other, [0, 1, 2, 10], ready=12)
    out = run(engine, starts=[row], chunks=[Chunk(1, 12, 3, True)])
    assert out[0].tokens == greedy_reference(checkpoint[1], other, 1)


def test_copied_page_can_be_written_without_touching_its_source(checkpoint, engine):
    run(engine, starts=[start(0, PROMPT[:7], [0, 1])], chunks=[Chunk(0, 0, 7, True)])
    other = [*PROMPT[:6], 99]
    row = start(1, other, [0, 2], ready=6)
    out = run(engine, copies=[(1, 2)], starts=[row], chunks=[Chunk(1, 6, 1, True)], decodes=[0])
    assert out[0].tokens == greedy_reference(checkpoint[1], other, 1)
    assert out[1].tokens == greedy_reference(checkpoint[1], PROMPT[:7], 2)[1:]


def test_ended_row_can_be_bound_again(checkpoint, engine):
    run(engine, starts=[start(0, PROMPT, list(range(8)))], chunks=[Chunk(0, 0, 21, True)])
    out = run(engine, ends=[0], starts=[start(0, PROMPT[:5], [3, 1])], chunks=[Chunk(0, 0, 5, True)])
    assert out[0].tokens == greedy_reference(checkpoint[1], PROMPT[:5], 1)


@pytest.mark.parametrize(
    "plan",
    [
        {"decodes": [5]},
        {"starts": [start(0, PROMPT, [0, 1])], "chunks": [Chunk(0, 0, 21, True)]},
        {"starts": [start(0, PROMPT, list(range(8)))], "chunks": [Chunk(0, 0, 22, False)]},
        {"starts": [start(0, PROMPT, list(range(8)))], "chunks": [Chunk(0, 0, 20, True)]},
        {"starts": [start(0, PROMPT, list(range(8))), start(0, PROMPT, list(range(8)))]},
        {"ends": [4]},
        {"starts": [start(0, PROMPT, list(range(8)))], "chunks": [Chunk(0, 0, 21, True)], "steps_max": 2},
    ],
    ids=["no sequence", "too few pages", "past the known", "sample mid-way", "row in use", "end of nothing", "steps"],
)
def test_plan_that_contradicts_the_rows_is_our_bug(engine, plan):
    with pytest.raises(InternalError):
        engine.launch(BatchPlan(op=1, **plan))


def test_collect_without_launch_is_our_bug(engine):
    with pytest.raises(InternalError):
        engine.collect()


def test_only_the_row_whose_logits_are_nan_fails(checkpoint):
    """NaN enters by one token's embedding, fills that row's K/V, and stays there."""
    engine = engine_for(checkpoint[0])
    engine._runner.model.parameters.embed[251] = float("nan")
    rows = [
        start(0, PROMPT, [0, 1, 2, 3, 4, 5]),
        start(1, [251, 4, 5], [6, 7, 8, 9, 10]),
        start(2, PROMPT[:9], [11, 12, 13]),
    ]
    out = run(engine, starts=rows, chunks=[Chunk(0, 0, 21, True), Chunk(1, 0, 3, True), Chunk(2, 0, 9, True)])
    out2 = run(engine, decodes=[0, 1, 2])
    assert [entry.error for entry in out] == [None, ROW_FAILED, None]
    assert [entry.error for entry in out2] == [None, ROW_FAILED, None]
    assert out[1].tokens == []
    reused = start(3, PROMPT[:7], [6, 7])
    out3 = run(engine, ends=[1], starts=[reused], chunks=[Chunk(3, 0, 7, True)], decodes=[0])
    assert out3[0].tokens + run(engine, decodes=[3, 0])[0].tokens == greedy_reference(checkpoint[1], PROMPT[:7], 2)
    assert out[0].tokens + out2[0].tokens + out3[1].tokens == greedy_reference(checkpoint[1], PROMPT, 3)


def test_logprobs_of_each_row_and_step(checkpoint, engine):
    params = SamplingParams(temperature=0.0, logprobs=2)
    rows = [start(0, PROMPT, list(range(8)), params), start(1, PROMPT[:5], list(range(20, 24)))]
    run(engine, starts=rows, chunks=[Chunk(0, 0, 21, True), Chunk(1, 0, 5, True)])
    out = run(engine, decodes=[1, 0], steps_max=2)
    assert out[0].logprobs is None
    tokens = greedy_reference(checkpoint[1], PROMPT, 3)
    for step, entry in enumerate(out[1].logprobs):
        expected = reference_logits(checkpoint[1], PROMPT + tokens[: step + 1])[-1, :257].log_softmax(-1)
        assert entry.logprob == pytest.approx(expected[tokens[step + 1]].item(), abs=1e-4)
        assert [token for token, _ in entry.top] == expected.topk(2).indices.tolist()


def test_pages_live_in_the_buffer_that_was_given(checkpoint):
    config = EngineConfig(device="cpu", block_size=BLOCK, pages=6)
    model, scheduler = ModelConfig(path=str(checkpoint[0])), SchedulerConfig()
    info = read_model(model, config, scheduler)
    buffer = bytearray(info.pages_bytes)
    engine = load_engine(model, config, scheduler, page_buffer=memoryview(buffer), info=info)
    run(engine, starts=[start(0, PROMPT[:4], [5])], chunks=[Chunk(0, 0, 4, True)])
    engine.close()
    assert not any(buffer[: 5 * info.layout.page_bytes])
    assert any(buffer[5 * info.layout.page_bytes :])


def test_page_buffer_of_the_wrong_size_is_refused(checkpoint):
    config = EngineConfig(device="cpu", block_size=BLOCK, pages=6)
    with pytest.raises(ConfigError, match="page buffer of 10 bytes"):
        load_engine(
            ModelConfig(path=str(checkpoint[0])), config, SchedulerConfig(), page_buffer=memoryview(bytearray(10))
        )


def test_pool_of_more_than_two_billion_elements(checkpoint):
    """Pages behind element 2^31 of a lazily mapped pool hold the right values."""
    config = EngineConfig(device="cpu", block_size=BLOCK, pages=1, kv_dtype="float16")
    model, scheduler = ModelConfig(path=str(checkpoint[0])), SchedulerConfig()
    layout = read_model(model, config, scheduler).layout
    pages = 2**31 // (layout.page_bytes // 2) + 100
    config = EngineConfig(device="cpu", block_size=BLOCK, pages=pages, kv_dtype="float16")
    with mmap.mmap(-1, pages * layout.page_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pool:
        engine = load_engine(model, config, scheduler, page_buffer=memoryview(pool))
        small = engine_for_fp16(checkpoint[0])
        last = [pages - 1 - index for index in range(8)]
        far = run(engine, starts=[start(0, PROMPT, last)], chunks=[Chunk(0, 0, 21, True)])
        near = run(small, starts=[start(0, PROMPT, list(range(8)))], chunks=[Chunk(0, 0, 21, True)])
        assert far[0].tokens == near[0].tokens
        assert run(engine, decodes=[0])[0].tokens == run(small, decodes=[0])[0].tokens
        assert torch.equal(engine.pages[pages - 1], small.pages[0])
        assert engine.pages[pages - 1].any()
        engine.close()
        del engine


def engine_for_fp16(path: Path) -> Engine:
    config = EngineConfig(device="cpu", block_size=BLOCK, pages=8, kv_dtype="float16")
    return load_engine(ModelConfig(path=str(path)), config, SchedulerConfig())


@pytest.mark.parametrize("depth,pages,steps_max", [(0, 64, 1), (1, 64, 1), (0, 14, 1), (1, 14, 1), (0, 64, 4)])
def test_planner_and_engine_generate_the_reference_text(checkpoint, depth, pages, steps_max):
    """Six requests over a pool that holds them, or that forces preemption, at both pipeline depths."""
    engine = engine_for(checkpoint[0], pages=pages, pipeline_depth=depth, steps_max=steps_max)
    limits = PlannerLimits(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, pipeline_depth=depth, steps_max=steps_max
    )
    planner = BatchPlanner(BlockPool(pages, BLOCK), limits, ())
    prompts = [PROMPT[: 3 + 3 * index] for index in range(5)] + [PROMPT[:12]]
    for seq, prompt in enumerate(prompts):
        planner.add(seq, list(prompt), len(prompt), GREEDY, b"root", order=seq)
    texts: dict[int, list[int]] = {seq: [] for seq in range(len(prompts))}
    launched = 0
    while planner.has_work() or launched:
        plan = planner.plan()
        if plan is not None:
            engine.launch(plan)
            launched += 1
        if launched > depth or plan is None:
            for update in planner.finished(engine.collect()):
                texts[update.seq] += update.tokens
            launched -= 1
        planner.check()
    for seq, prompt in enumerate(prompts):
        assert texts[seq] == greedy_reference(checkpoint[1], prompt, GREEDY.max_tokens)


def test_padded_vocabulary_rows_are_unreachable(checkpoint, engine):
    assert engine.card.vocab_size == 257 < VOCAB
    params = SamplingParams(temperature=50.0, seed=3, ignore_eos=True)
    run(engine, starts=[start(0, PROMPT, list(range(24)), params)], chunks=[Chunk(0, 0, 21, True)])
    out = [run(engine, decodes=[0], steps_max=8)[0].tokens for _ in range(8)]
    assert max(max(tokens) for tokens in out) < 257
