"""How the vocabulary of a batch is divided among programs."""

from __future__ import annotations

import triton

SLICE = 1024
"""Tokens of one step of a program's loop."""

PROGRAMS = 1000
"""Enough to fill a GPU several times. Longer loops than that asks for pay: exact noise is drawn in the first slice of a
program and then only where it can win, and programs of rows that another sampler serves only start and end."""


def slices_each(batch: int, vocab_size: int) -> int:
    """Slices per program: 1, 2, 4, 8 or 16."""
    slices = triton.cdiv(vocab_size, SLICE)
    wanted = batch * slices // PROGRAMS
    return 1 << max(0, min(wanted, 16).bit_length() - 1)
