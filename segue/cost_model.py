"""How long a step, a prefill or a transfer takes: roofline form with few coefficients, fitted, corrected, bounded.

    prefill  f(new, cached) = max(floor, base + token * new + pair * pairs)
             pairs          = new * cached + new * (new + 1) / 2
    decode   g(batch, kv)   = base + row * batch + kv_token * kv      kv = K/V tokens that the step reads
    link     h(bytes)       = latency + bytes / rate

`floor` and decode's `base` are the weights read once; `token` and `row` the matrix products of a token, `pair` the
attention of one query to one key, `kv_token` the K/V of one token read from memory. A mixed step reads the weights
once: `step_us`. All linear in the coefficients, so that a fit is one least-squares solution (`fit_prefill`,
`fit_decode`).

What a fit leaves over is measured while serving, and bounded: `segue.calibration`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class PrefillCost(msgspec.Struct, frozen=True, kw_only=True):
    base_us: float
    token_us: float
    pair_us: float
    floor_us: float = 0.0

    def us(self, new: int, cached: int = 0) -> float:
        """Time to compute `new` tokens behind `cached` ones; 0 when there is nothing to compute."""
        if new <= 0:
            return 0.0
        return max(self.floor_us, self.base_us + self.token_us * new + self.pair_us * attention_pairs(new, cached))


class DecodeCost(msgspec.Struct, frozen=True, kw_only=True):
    base_us: float
    row_us: float
    kv_token_us: float

    def us(self, batch: int, kv_tokens: float) -> float:
        """Time of one step of `batch` sequences that reads `kv_tokens` of K/V; 0 for an empty batch."""
        if batch <= 0:
            return 0.0
        return self.base_us + self.row_us * batch + self.kv_token_us * kv_tokens


class LinkCost(msgspec.Struct, frozen=True, kw_only=True):
    latency_us: float
    bytes_per_us: float

    def us(self, size_bytes: float) -> float:
        return self.latency_us + size_bytes / self.bytes_per_us


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one kind of instance."""

    prefill: PrefillCost
    decode: DecodeCost
    kv_token_bytes: int

    def step_us(self, chunks: Sequence[tuple[int, int]], batch: int, kv_tokens: float) -> float:
        """One step that computes `chunks` of (new, cached) tokens and decodes `batch` sequences: the weights are read
        once, whoever needs them."""
        if not chunks:
            return self.decode.us(batch, kv_tokens)
        prefill, decode = self.prefill, self.decode
        new = sum(length for length, _ in chunks)
        attention_us = prefill.pair_us * sum(attention_pairs(length, cached) for length, cached in chunks)
        prefill_us = max(prefill.floor_us, prefill.base_us + prefill.token_us * new + attention_us)
        if not batch:
            return prefill_us
        return max(prefill_us, decode.base_us) + decode.row_us * batch + decode.kv_token_us * kv_tokens


def attention_pairs(new: int, cached: int) -> float:
    """(query, key) pairs of causal attention of `new` tokens behind `cached` ones."""
    return new * cached + new * (new + 1) / 2


# -- fitting


class PrefillRow(msgspec.Struct, frozen=True, array_like=True):
    """One measured prefill."""

    new: int
    cached: int
    us: float


class DecodeRow(msgspec.Struct, frozen=True, array_like=True):
    """One measured decode step."""

    batch: int
    kv_tokens: float
    us: float


def fit_prefill(rows: Sequence[PrefillRow]) -> PrefillCost:
    """Least relative squares; no coefficient below 0. The shortest measured prefill becomes the floor.

    Raises ValueError for fewer than three rows or a time that is not positive.
    """
    features = [[1.0, float(row.new), attention_pairs(row.new, row.cached)] for row in rows]
    base_us, token_us, pair_us = _fit(features, [row.us for row in rows])
    floor_us = min(row.us for row in rows)
    return PrefillCost(base_us=base_us, token_us=token_us, pair_us=pair_us, floor_us=floor_us)


def fit_decode(rows: Sequence[DecodeRow]) -> DecodeCost:
    """As `fit_prefill`, for steps of a running batch."""
    features = [[1.0, float(row.batch), float(row.kv_tokens)] for row in rows]
    base_us, row_us, kv_token_us = _fit(features, [row.us for row in rows])
    return DecodeCost(base_us=base_us, row_us=row_us, kv_token_us=kv_token_us)


def fit_link(sizes_bytes: Sequence[float], times_us: Sequence[float]) -> LinkCost:
    """Latency and rate of a link from finished transfers. Raises ValueError where no rate shows."""
    latency_us, byte_us = _fit([[1.0, float(size)] for size in sizes_bytes], list(times_us))
    if byte_us <= 0.0:
        raise ValueError("transfer times do not grow with size: no rate to be learned")
    return LinkCost(latency_us=latency_us, bytes_per_us=1.0 / byte_us)


def _fit(features: list[list[float]], times_us: list[float]) -> list[float]:
    """Non-negative least squares on relative errors: solve, drop what came out negative, solve again."""
    width = len(features[0]) if features else 0
    if len(features) < max(width, 1) or any(not time_us > 0 for time_us in times_us):
        raise ValueError(f"a fit of {width} coefficients needs as many rows with positive times, got {len(features)}")
    scales = [max(abs(row[column]) for row in features) or 1.0 for column in range(width)]
    weighted = [
        [value / scale / time_us for value, scale in zip(row, scales, strict=True)]
        for row, time_us in zip(features, times_us, strict=True)
    ]
    kept = list(range(width))
    while True:
        solution = _least_squares([[row[column] for column in kept] for row in weighted])
        negative = [column for column, value in zip(kept, solution, strict=True) if value < 0]
        if not negative:
            break
        kept = [column for column in kept if column not in negative]
        if not kept:
            raise ValueError("no non-negative coefficient explains these rows")
    values = dict(zip(kept, solution, strict=True))
    return [values.get(column, 0.0) / scales[column] for column in range(width)]


def _least_squares(rows: list[list[float]]) -> list[float]:
    """x that minimises |rows x - 1|, by the normal equations with a trace of damping: few, scaled columns."""
    width = len(rows[0])
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(width)] for i in range(width)]
    target = [sum(row[i] for row in rows) for i in range(width)]
    damping = 1e-12 * max(matrix[i][i] for i in range(width))
    for i in range(width):
        matrix[i][i] += damping
    for pivot in range(width):
        best = max(range(pivot, width), key=lambda row: abs(matrix[row][pivot]))
        matrix[pivot], matrix[best] = matrix[best], matrix[pivot]
        target[pivot], target[best] = target[best], target[pivot]
        for row in range(pivot + 1, width):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            for column in range(pivot, width):
                matrix[row][column] -= factor * matrix[pivot][column]
            target[row] -= factor * target[pivot]
    solution = [0.0] * width
    for row in reversed(range(width)):
        rest = sum(matrix[row][column] * solution[column] for column in range(row + 1, width))
        solution[row] = (target[row] - rest) / matrix[row][row]
    return solution
