"""What goes into and comes out of a batch planner, apart from plans and results."""

from __future__ import annotations

import msgspec

from segue.plan import PromptScores, TokenLogprobs


class PlannerLimits(msgspec.Struct, frozen=True):
    max_num_seqs: int
    """Rows of the batch."""
    max_num_batched_tokens: int
    """Token budget of one step. At least `max_num_seqs`, or the youngest decodes wait for the older ones."""
    max_model_len: int
    """Prompt and generated tokens together."""
    pipeline_depth: int = 0
    """Plans that may be in flight while the next one is made."""
    steps_max: int = 1
    """Decode steps in one plan without chunks."""
    tokens_saturating: int = 0
    """Tokens of a step, chunks and decodes together, that keep the device busy; 0: only the token budget counts. More
    would not raise its rate, only delay the decodes and the first tokens of those in the step. A prompt that is alone
    may still use the whole budget: it wants few, long chunks."""


class SeqUpdate(msgspec.Struct, frozen=True):
    """What one result changed for one sequence."""

    seq: int
    tokens_computed: int
    """Positions 0 .. tokens_computed-1 have final K/V in the sequence's pages."""
    tokens: list[int]
    """Newly sampled tokens, in order; none beyond the one that ended the sequence."""
    logprobs: list[TokenLogprobs] | None
    finish: str
    """Empty while it goes on, else stop, length or error."""
    error: str
    tokens_cached: int
    """Prompt tokens found in the prefix cache when it was first admitted; hits after a preemption do not count."""
    scores: PromptScores | None = None
    """Log-probabilities of prompt tokens, where asked for. Repeated for positions computed again after a preemption."""


class Reservation(msgspec.Struct, frozen=True):
    """Pages granted for K/V that will arrive from elsewhere; the block table is pages_cached + pages_new."""

    pages_cached: list[int]
    """Published prefix, valid already; referenced."""
    pages_new: list[int]
    """Held: written from outside, read by nobody until they land."""
    seq: int


class PlannerCounts(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    tokens_queued: int
    """Known tokens whose K/V has still to be computed by prefill chunks."""
    tokens_running: int
    """K/V tokens of running sequences: what a decode step reads."""
    preemptions: int
    """Since the start."""
