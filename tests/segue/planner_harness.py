"""A planner and a fake engine joined: drives both, collects what users would see, checks invariants at every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from paged_fake_engine import PagedFakeEngine, reference_tokens

from segue.batch_planner import BatchPlanner, PlannerLimits, SeqUpdate
from segue.block_hash import block_hashes, token_bytes
from segue.block_pool import BlockPool
from segue.plan import BatchPlan
from segue.sampling_params import SamplingParams

ROOT = b"root of the chain"
EOS = 49


@dataclass
class Output:
    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    tokens_cached: int = 0
    tokens_computed: list[int] = field(default_factory=list)


class PlannerHarness:
    def __init__(
        self,
        *,
        pages: int = 64,
        block_size: int = 4,
        seqs: int = 8,
        budget: int = 64,
        model_len: int = 64,
        depth: int = 0,
        steps: int = 1,
        caching: bool = True,
        saturating: int = 0,
    ) -> None:
        self.pool = BlockPool(pages, block_size, caching)
        limits = PlannerLimits(seqs, budget, model_len, depth, steps, saturating)
        self.planner = BatchPlanner(self.pool, limits, (EOS,))
        self.engine = PagedFakeEngine(self.pool)
        self.outputs: dict[int, Output] = {}
        self.plans: list[BatchPlan] = []

    def add(
        self, seq: int, prompt: list[int], *, prefill_only: bool = False, order: int = 0, **sampling: object
    ) -> None:
        params = SamplingParams(**({"max_tokens": 4, "ignore_eos": True} | sampling))  # type: ignore[arg-type]
        self.planner.add(seq, prompt, len(prompt), params, ROOT, order=order, prefill_only=prefill_only)
        self.outputs[seq] = Output(list(prompt), params)

    def hashes(self, tokens: list[int]) -> list[bytes]:
        return block_hashes(ROOT, token_bytes(tokens), self.pool.block_size)

    def launch(self) -> BatchPlan | None:
        plan = self.planner.plan()
        if plan is not None:
            self.engine.launch(plan)
            self.plans.append(plan)
        self.planner.check()
        return plan

    def collect(self, steps: int | None = None) -> list[SeqUpdate]:
        updates = self.planner.finished(self.engine.collect(steps))
        self.planner.check()
        for update in updates:
            output = self.outputs[update.seq]
            assert not output.finish, f"sequence {update.seq} goes on after its end"
            output.tokens += update.tokens
            output.finish, output.error = update.finish, update.error
            output.tokens_cached = update.tokens_cached
            output.tokens_computed.append(update.tokens_computed)
        return updates

    def step(self) -> BatchPlan | None:
        """Plan as far as may be, then take one result."""
        first = plan = self.launch()
        while plan is not None:
            plan = self.launch()
        if self.engine.queue:
            self.collect()
        return first

    def run(self, steps_max: int = 2000) -> None:
        for _ in range(steps_max):
            if not self.planner.has_work():
                return
            self.step()
        raise AssertionError(f"no end after {steps_max} steps: {self.planner.counts()}")

    def expected(self, seq: int) -> tuple[list[int], str]:
        """All tokens of a sequence and why it ends, from the model alone."""
        output = self.outputs[seq]
        room = min(output.sampling.max_tokens, self.planner.tokens_max - len(output.prompt))
        stops = set(output.sampling.stop_token_ids) | (set() if output.sampling.ignore_eos else {EOS})
        tokens = reference_tokens(output.prompt, room)
        for count, token in enumerate(tokens, 1):
            if token in stops and count >= output.sampling.min_tokens:
                return tokens[:count], "stop"
        return tokens, "length"

    def check_output(self, seq: int) -> None:
        output = self.outputs[seq]
        assert (output.tokens, output.finish) == self.expected(seq), f"sequence {seq}"

    def check_outputs(self) -> None:
        for seq in self.outputs:
            self.check_output(seq)

    def check_idle(self) -> None:
        """Nothing runs: no page is left behind."""
        counts = self.pool.counts()
        assert counts.active == counts.held == counts.quarantined == 0
        assert counts.free + counts.cached == counts.total
