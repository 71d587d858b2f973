"""How an attempt joins the running batch: with its prompt computed by P, or to compute it here."""

from __future__ import annotations

from msgspec.structs import replace

from decode_worker.core.attempt import DecodeAttempt
from segue.batch_planner import BatchPlanner
from segue.errors import RequestError
from segue.handoff_messages import PrefillDone


def start_locally(planner: BatchPlanner, attempt: DecodeAttempt) -> str:
    """Queue the attempt for local prefill; why it cannot be taken, or ""."""
    assign = attempt.assign
    try:
        planner.add(
            attempt.seq,
            attempt.tokens,
            assign.tokens_prompt,
            assign.sampling,
            assign.hash_root,
            order=attempt.seq,
            hashes=attempt.hashes,
        )
    except RequestError as error:
        return error.message
    return ""


def land(planner: BatchPlanner, attempt: DecodeAttempt, message: PrefillDone, block_size: int) -> str:
    """Make the lent pages the attempt's block table; why it cannot run, or "".

    Where a page failed on the way (`blocks_valid` < `blocks_total`), the planner computes again from the valid prefix.
    If the prompt was to be scored, P has done that before it said that it was done.
    """
    assert attempt.reservation is not None
    assign, tokens = attempt.assign, [*attempt.tokens, message.first_token]
    try:
        planner.land(
            attempt.seq,
            tokens,
            assign.tokens_prompt,
            replace(assign.sampling, prompt_logprobs=None),
            assign.hash_root,
            attempt.reservation,
            min(message.blocks_valid * block_size, len(attempt.tokens)),
            order=attempt.seq,
            hashes=attempt.hashes,
        )
    except RequestError as error:
        return error.message
    attempt.reservation = None
    attempt.was_handed_over = True
    attempt.position = len(tokens)
    attempt.tokens_generated += 1
    return ""
