"""With `batch_invariant` a request's tokens and log-probabilities have the same bits alone and in any company."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import family_configs, write_checkpoint

from engine.batch_invariant.apart import joined
from engine.batch_invariant.mode import check_batch_invariant
from engine.batch_invariant.row_blocks import RowBlocks, agreeing, block_sizes
from engine.batch_invariant.weights import FixedWeight
from engine.engine import DTYPES, ModelInfo, build_model, read_model
from engine.model import DecoderModel
from engine.parallel import Mesh
from engine.row_state import RowState
from engine.runner import Runner
from engine.sampling_state import SampledTokens, SamplingState
from launcher.demo_model import demo_model_path
from segue.batch_planner import BatchPlanner, PlannerLimits
from segue.block_pool import BlockPool
from segue.config import EngineConfig, ModelConfig
from segue.errors import ConfigError
from segue.plan import TokenLogprobs
from segue.sampling_params import SamplingParams

ROWS, POSITIONS, PAGES = 6, 128, 120
FAMILIES = ("llama", "gemma2", "qwen3", "mistral_window")
"""Plain; soft caps, norms after sub-layers and a window; norms of Q and K; a window."""


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[TokenLogprobs]


class Served:
    """One model; every call of `answers` starts with empty pages."""

    def __init__(self, path: Path, *, batch_invariant: bool = True) -> None:
        config = EngineConfig(device="cpu", block_size=8, pages=PAGES, batch_invariant=batch_invariant)
        self.info: ModelInfo = read_model(ModelConfig(path=str(path), max_model_len=POSITIONS), config)
        self.model: DecoderModel = build_model(self.info, config, positions_max=POSITIONS)
        self.apart = batch_invariant

    def answers(
        self, requests: dict[int, tuple[list[int], SamplingParams]], budget: int, rows: int = ROWS, caching: bool = True
    ) -> dict[int, Answer]:
        pages = torch.full((PAGES, *self.info.layout.page_shape), float("nan"), dtype=DTYPES[self.info.layout.dtype])
        state = RowState(ROWS, POSITIONS, 8, self.info.device)
        card = self.info.card
        sampling = SamplingState(ROWS, card.vocab_size, self.info.spec.vocab_rows, card.eos_ids, self.info.device)
        runner = Runner(self.model, pages, state, sampling, sample_apart=self.apart)
        planner = BatchPlanner(BlockPool(PAGES, 8), PlannerLimits(rows, budget, POSITIONS, 0, 1), eos_ids=(256,))
        for seq, (prompt, params) in requests.items():
            root = b"root" if caching else f"root {seq}".encode()
            planner.add(seq, prompt, len(prompt), params, root, order=seq)
        found = {seq: Answer([], []) for seq in requests}
        while planner.has_work():
            plan = planner.plan()
            assert plan is not None
            runner.launch(plan)
            for update in planner.finished(runner.collect()):
                assert update.finish != "error", update.error
                found[update.seq].tokens.extend(update.tokens)
                found[update.seq].logprobs.extend(update.logprobs or [])
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    models = {}
    for family in FAMILIES:
        path = tmp_path_factory.mktemp(family)
        write_checkpoint(family_configs()[family], path)
        models[family] = Served(path)
    return models


prompts = st.lists(st.integers(0, 9), min_size=1, max_size=50)
"""Few distinct tokens, so that prompts begin alike and the prefix cache has hits."""

wishes = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 2**63),
    top_p=st.sampled_from([1.0, 0.7]),
    top_k=st.sampled_from([0, 5]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logprobs=st.sampled_from([None, 0, 3]),
    max_tokens=st.integers(1, 6),
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=4)
@given(
    requests=st.lists(st.tuples(prompts, wishes), min_size=2, max_size=8),
    budget=st.sampled_from([5, 16, 64]),
    rows=st.integers(1, ROWS),
    caching=st.booleans(),
)
def test_company_chunks_and_cache_change_no_bit(served, family, requests, budget, rows, caching):
    numbered = dict(enumerate(requests))
    together = served[family].answers(numbered, max(budget, rows), rows, caching)
    alone = {seq: served[family].answers({seq: request}, 64)[seq] for seq, request in numbered.items()}
    assert together == alone


def test_without_the_option_company_does_change_bits(tmp_path):
    """Else the tests above would prove nothing."""
    write_checkpoint(family_configs()["llama"], tmp_path)
    plain = Served(tmp_path, batch_invariant=False)
    params = SamplingParams(temperature=0.0, logprobs=3, max_tokens=6)
    requests = {seq: (list(range(seq, seq + 20)), params) for seq in range(6)}
    alone = {seq: plain.answers({seq: request}, 64)[seq] for seq, request in requests.items()}
    assert plain.answers(requests, 16) != alone


@given(rows=st.integers(1, 600), sizes=st.sets(st.sampled_from([2, 4, 8, 64, 256])))
@example(rows=1, sizes=set())
def test_blocks_hold_all_rows_with_little_padding(rows, sizes):
    sizes = tuple(sorted(sizes)) or (1,)
    blocks = block_sizes(rows, sizes)
    assert set(blocks) <= set(sizes) and blocks == sorted(blocks, reverse=True)
    assert 0 <= sum(blocks) - rows < sizes[0]


@pytest.mark.parametrize(("out", "inner"), [(140, 60), (60, 92), (263, 60), (960, 576)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_has_the_same_bits_in_every_batch_and_place(out, inner, dtype):
    weight = torch.randn(out, inner).to(dtype)
    fixed = FixedWeight(weight, agreeing(weight))
    x = torch.randn(70, inner).to(dtype)
    whole = fixed.product(x)
    for first, rows in ((0, 1), (69, 1), (3, 2), (5, 7), (1, 33), (6, 64)):
        assert torch.equal(fixed.product(x[first : first + rows]), whole[first : first + rows])
    torch.testing.assert_close(whole.float(), x.float() @ weight.float().t(), rtol=2e-2, atol=2e-2 * inner**0.5)


def test_sizes_that_disagree_are_left_out(monkeypatch):
    def by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A library whose large products, and last rows of products of 256, differ in the last bits."""
        out = (x[:1] @ weight.t()).repeat(len(x), 1)
        out[:] *= 1 + 2.0**-20 if len(x) > 16 else 1.0
        out[255:] *= 1 + 2.0**-20
        return out

    monkeypatch.setattr("engine.batch_invariant.row_blocks.library_product", by_rows)
    assert agreeing(torch.randn(64, 32)) == RowBlocks((32, 64))


def test_one_row_at_a_time_is_left_when_nothing_agrees(monkeypatch):
    def by_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t() + torch.arange(len(x), dtype=x.dtype)[:, None]

    monkeypatch.setattr("engine.batch_invariant.row_blocks.library_product", by_place)
    assert agreeing(torch.randn(64, 32)) == RowBlocks((1,))


def test_joined_rows_keep_their_own_number_of_alternatives():
    def one(token: int, count: int | None) -> SampledTokens:
        tokens, failed = torch.tensor([token]), torch.tensor([False])
        if count is None:
            return SampledTokens(tokens, failed)
        ids = torch.arange(count)[None]
        return SampledTokens(tokens, failed, (0,), (count,), torch.tensor([-1.0]), ids.float(), ids)

    both = joined([one(5, 2), one(6, None), one(7, 0)])
    assert both.tokens.tolist() == [5, 6, 7]
    assert (both.logprob_rows, both.logprob_counts) == ((0, 2), (2, 0))
    assert both.top_ids.shape == (2, 2)
    assert joined([one(5, None)]).logprobs is None


@pytest.mark.parametrize(
    ("model", "engine", "mesh", "message"),
    [
        ({}, {"attention_prefill": "cudnn"}, Mesh(), "attention_prefill 'cudnn' depends on the batch; triton does not"),
        ({}, {"attention_decode": "torch"}, Mesh(), "attention_decode 'torch'"),
        ({"quantization": "fp8"}, {}, Mesh(), "quantization 'fp8'"),
        ({}, {}, Mesh(0, 2), "sums over 2 ranks"),
    ],
)
def test_what_cannot_keep_the_promise_is_refused_by_name(model, engine, mesh, message):
    options = EngineConfig(batch_invariant=True, **engine)
    with pytest.raises(ConfigError, match=message):
        check_batch_invariant(ModelConfig(path="m", **model), options, mesh, torch.device("cuda"))


def test_its_pages_are_not_exchanged_with_those_of_another_arithmetic(tmp_path):
    write_checkpoint(family_configs()["llama"], tmp_path)

    def info(**options: object) -> ModelInfo:
        return read_model(ModelConfig(path=str(tmp_path)), EngineConfig(device="cpu", pages=1, **options))

    plain, fixed, threaded = info(), info(batch_invariant=True), info(batch_invariant=True, threads=3)
    assert plain.numerics == "" and "3 threads" in threaded.numerics
    assert len({plain.kv_root, fixed.kv_root, threaded.kv_root}) == 3
    assert fixed == info(batch_invariant=True)


@pytest.mark.slow
def test_smollm2_gives_the_same_bits_alone_and_in_company():
    served = Served(demo_model_path())
    sampled = SamplingParams(temperature=0.8, seed=5, top_p=0.9, logprobs=3, max_tokens=8)
    requests = {seq: (list(range(100, 110 + 23 * seq)), sampled) for seq in range(4)}
    alone = {seq: served.answers({seq: request}, 128)[seq] for seq, request in requests.items()}
    for budget, caching in ((128, True), (17, False)):
        assert served.answers(requests, budget, caching=caching) == alone
