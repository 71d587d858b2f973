"""What a batch planner tells an engine to do, and what the engine answers.

An engine keeps one *row* of state per running sequence: its token ids, its block table and its sampling parameters. A
plan changes rows and says what to compute; it never repeats what the engine already knows, so that a plan stays small
at batch 256 and can be broadcast to other ranks as msgpack.

Order inside one plan: `ends`, then `copies`, then `starts`, then `grows`, then compute (`chunks` and `decodes`
together, as one batch). Positions count from 0 over prompt and generated tokens alike. Sampling "at position p" means
choosing the token that will stand at position p; its noise is keyed by (seed, p).

    chunk(row, start, length, sample)  computes K/V of positions start .. start+length-1 from the row's known tokens;
                                       with `sample` (only when start+length is the row's token count) it samples the
                                       token at position start+length and appends it to the row
    decode(row)                        with n tokens known: computes K/V of position n-1, samples position n, appends

At pipeline depth 1 a plan may name a row in `decodes` whose newest token is not yet known to the planner; the engine
has it on the device. `steps_max` > 1 (only for plans without chunks) lets the engine run that many decode steps in a
row; pages for all of them are in the block table already.
"""

from __future__ import annotations

import msgspec

from segue.sampling_params import SamplingParams


class RowStart(msgspec.Struct, frozen=True, array_like=True):
    """Bind a sequence to a free row. `tokens_ready` positions already have valid K/V in `pages`."""

    row: int
    seq: int
    tokens: list[int]
    tokens_prompt: int
    tokens_ready: int
    pages: list[int]
    sampling: SamplingParams


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    row: int
    start: int
    length: int
    sample: bool


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One unit of engine work. `op` gets exactly one PlanResult."""

    op: int
    ends: list[int] = []
    copies: list[tuple[int, int]] = []
    """(source page, target page), whole pages: copy-on-write."""
    starts: list[RowStart] = []
    grows: list[tuple[int, list[int]]] = []
    """(row, pages appended to its block table)."""
    chunks: list[Chunk] = []
    decodes: list[int] = []
    steps_max: int = 1


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (after temperature is *not* applied, as OpenAI reports) of the token and of the best others."""

    logprob: float
    top: list[tuple[int, float]] = []


class PromptScores(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive known tokens by columns; token i stands at `position` + i.

    `ranks` count from 1 over the vocabulary. `top_ids` and `top_logprobs` hold `alternatives` entries for each token,
    best first, one token after the other.
    """

    position: int
    alternatives: int
    logprobs: list[float]
    ranks: list[int]
    top_ids: list[int]
    top_logprobs: list[float]


class RowScores(msgspec.Struct, frozen=True, array_like=True):
    row: int
    seq: int
    scores: PromptScores


class RowTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens sampled for one row, one per step done. `error` set (and no tokens): only this row failed (NaN logits)."""

    row: int
    seq: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


class PlanResult(msgspec.Struct, frozen=True, kw_only=True):
    """`rows` has one entry for each sampling chunk and each decode of the plan; `scores` one for each chunk of a row
    with `prompt_logprobs` that scored prompt tokens: a chunk scores the tokens that follow its positions."""

    op: int
    steps: int
    rows: list[RowTokens]
    elapsed_us: int
    scores: list[RowScores] = []
