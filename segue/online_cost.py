"""A cost model that is kept right while serving: measured steps and prefills correct it, and replace it where they fit
better.

A prior (a fit to benchmark rows, or a node's data sheet) is used as it is until REFIT_ROWS rows of a kind were seen.
From then on the coefficients of that kind are fitted to the recent rows every REFIT_ROWS of them, and the fit is taken
if its median relative error on those rows is the smaller. Without a prior nothing is predicted before the first fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from segue.cost_model import (
    CostModel,
    DecodeCost,
    DecodeRow,
    PrefillCost,
    PrefillRow,
    fit_decode,
    fit_prefill,
)

ROWS_KEPT = 256
"""Of each kind, the most recent."""

REFIT_ROWS = 32
"""A fit to 256 rows takes about 1 ms."""


class OnlineCost:
    """`prefill` and `decode` are None as long as nothing is known."""

    def __init__(self, prior: CostModel | None = None) -> None:
        self.prefill: PrefillCost | None = None if prior is None else prior.prefill
        self.decode: DecodeCost | None = None if prior is None else prior.decode
        self._prefills: deque[PrefillRow] = deque(maxlen=ROWS_KEPT)
        self._decodes: deque[DecodeRow] = deque(maxlen=ROWS_KEPT)
        self._unfitted_prefills = 0
        self._unfitted_decodes = 0

    @property
    def is_known(self) -> bool:
        return self.prefill is not None and self.decode is not None

    def observe_prefill(self, new: int, cached: int, us: float) -> None:
        """One prompt that had an instance to itself for `us`."""
        if us <= 0 or new <= 0:
            return
        self._prefills.append(PrefillRow(new, cached, us))
        self._unfitted_prefills += 1
        if self._unfitted_prefills >= REFIT_ROWS:
            self._unfitted_prefills = 0
            self.prefill = _better_prefill(self.prefill, self._prefills)

    def observe_decode(self, batch: int, kv_tokens: float, us: float) -> None:
        """One step without prefill chunks."""
        if us <= 0 or batch <= 0:
            return
        self._decodes.append(DecodeRow(batch, kv_tokens, us))
        self._unfitted_decodes += 1
        if self._unfitted_decodes >= REFIT_ROWS:
            self._unfitted_decodes = 0
            self.decode = _better_decode(self.decode, self._decodes)


def _better_prefill(known: PrefillCost | None, rows: Sequence[PrefillRow]) -> PrefillCost | None:
    try:
        fitted = fit_prefill(rows)
    except ValueError:  # rows that no non-negative coefficients explain: what is known stays
        return known
    if known is None:
        return fitted
    known_error = median(abs(known.us(row.new, row.cached) / row.us - 1) for row in rows)
    fitted_error = median(abs(fitted.us(row.new, row.cached) / row.us - 1) for row in rows)
    return fitted if fitted_error < known_error else known


def _better_decode(known: DecodeCost | None, rows: Sequence[DecodeRow]) -> DecodeCost | None:
    try:
        fitted = fit_decode(rows)
    except ValueError:
        return known
    if known is None:
        return fitted
    known_error = median(abs(known.us(row.batch, row.kv_tokens) / row.us - 1) for row in rows)
    fitted_error = median(abs(fitted.us(row.batch, row.kv_tokens) / row.us - 1) for row in rows)
    return fitted if fitted_error < known_error else known
