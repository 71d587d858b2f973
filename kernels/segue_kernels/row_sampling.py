"""What rows ask of their sampling beyond a temperature, as one table on the device that kernels read by row.

A row is `ROW_WORDS` int32 words; floats are stored by their bits. Word 0 is 0 for a row that wants nothing more than
temperature and seed: the kernels of `general_sampling` leave such rows at once. Lists stand last, so that a row is
uploaded up to its last used word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

FLAGS, TOP_K, TOP_P, LOG_MIN_P, PRESENCE, FREQUENCY, REPETITION, STOPS_UNTIL, BIASES, STOPS, LOGPROBS = range(11)
"""STOPS_UNTIL: tokens at positions below it may not be one of the row's stops. LOGPROBS: alternatives to report."""
HEAD_WORDS = 16

GENERAL, PENALISED, REPORTED = 1, 2, 4
"""Bits of FLAGS: GENERAL is set in every row that has any."""

STOPS_MAX = 128
"""64 of a request, and a model's own ends of text."""
BIASES_MAX = 1024
ALTERNATIVES_MAX = 20
STOPS_AT = HEAD_WORDS
BIASES_AT = STOPS_AT + STOPS_MAX
ROW_WORDS = BIASES_AT + 2 * BIASES_MAX


@dataclass(frozen=True, slots=True)
class RowWish:
    """One row's wishes. Filters are off at top_k 0, top_p 1 and log_min_p -inf."""

    top_k: int = 0
    top_p: float = 1.0
    log_min_p: float = float("-inf")
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    stops_until: int = 0
    stops: Sequence[int] = ()
    biases: Sequence[tuple[int, float]] = ()
    """(token, value), each token once."""
    logprobs: int | None = None

    @property
    def is_penalised(self) -> bool:
        return self.presence != 0.0 or self.frequency != 0.0 or self.repetition != 1.0

    def words(self) -> npt.NDArray[np.int32]:
        """The row's words up to the last that is used. ValueError when a list is longer than the table."""
        if len(self.stops) > STOPS_MAX or len(self.biases) > BIASES_MAX:
            raise ValueError(f"at most {STOPS_MAX} stop tokens and {BIASES_MAX} biases fit a row")
        biases = sorted(self.biases)
        words = np.zeros(BIASES_AT + 2 * len(biases), dtype=np.int32)
        flags = GENERAL | PENALISED * self.is_penalised | REPORTED * (self.logprobs is not None)
        words[FLAGS], words[TOP_K], words[STOPS_UNTIL] = flags, self.top_k, self.stops_until
        floats = np.array(
            [self.top_p, self.log_min_p, self.presence, self.frequency, self.repetition], dtype=np.float32
        )
        words[[TOP_P, LOG_MIN_P, PRESENCE, FREQUENCY, REPETITION]] = floats.view(np.int32)
        words[[BIASES, STOPS, LOGPROBS]] = len(biases), len(self.stops), self.logprobs or 0
        words[STOPS_AT : STOPS_AT + len(self.stops)] = sorted(self.stops)
        if biases:
            ids, values = zip(*biases, strict=True)
            words[BIASES_AT::2] = ids
            words[BIASES_AT + 1 :: 2] = np.array(values, dtype=np.float32).view(np.int32)
        return words


@dataclass(frozen=True, slots=True)
class RowTable:
    """All rows' wishes, and the token counts that penalties need."""

    words: torch.Tensor
    """int32 [rows, ROW_WORDS]"""
    generated: torch.Tensor
    """int32 [rows, >= vocab]: how often a row has generated each token; sampling adds what it chooses."""
    in_prompt: torch.Tensor
    """bool, same shape"""

    @classmethod
    def allocate(cls, generated: torch.Tensor, in_prompt: torch.Tensor) -> RowTable:
        words = torch.zeros(generated.shape[0], ROW_WORDS, dtype=torch.int32, device=generated.device)
        return cls(words, generated, in_prompt)
