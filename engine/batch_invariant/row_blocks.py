"""Matrix products on a CPU in blocks of few fixed numbers of rows.

A library picks its kernel by the number of rows, and kernels sum in different orders: with AVX2 a row of F.linear has
other bits alone, in twos and in threes than in fours, and with two threads five rows differ among themselves. Among the
numbers of rows for which a weight's products do agree, bit for bit and in every place, rows may be dealt out freely.
Which those are is found when weights have been read, by multiplying them with copies of one random row: an order of
summation that differs shows in some of the thousands of sums. One row alone always agrees with itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

SIZES = (1, 2, 4, 8, 16, 32, 64, 256)
"""Rows of a block. From 64 on a row costs as little as in larger products."""

REFERENCES = (64, 16, 8, 4, 2, 1)
"""Sizes with which others must agree, the best first: small ones alone make long chunks slow."""

SUMS_MAX = 1 << 22
"""Results of one probe: larger blocks of wider weights are not tried."""

ALIGNED_ROWS = 16
"""So many rows of any width are a multiple of 64 bytes: a block that starts at one is aligned as fresh memory is."""

_HAS_ONEDNN: bool = (
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


def library_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, in], weight [out, in], contiguous -> [rows, out]. oneDNN's kernels agree from two rows on, the BLAS's
    from four: a lone decode costs two rows instead of four."""
    if _HAS_ONEDNN and weight.dtype == torch.float32:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return product
    return F.linear(x, weight)


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Sizes of blocks, ascending, whose products agree for weights of one shape."""

    sizes: tuple[int, ...]

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]; the last block is padded with zeros."""
        rows = x.shape[0]
        done, parts = 0, []
        for size in block_sizes(rows, self.sizes):
            block = x[done : done + size]
            if size < ALIGNED_ROWS or block.shape[0] < size:
                block = x.new_zeros(size, x.shape[1])
                block[: rows - done] = x[done : done + size]
            parts.append(library_product(block.contiguous(), weight))
            done += size
        return parts[0][:rows] if len(parts) == 1 else torch.cat(parts)[:rows]


def block_sizes(rows: int, sizes: tuple[int, ...]) -> list[int]:
    """Blocks for `rows`, largest first, with at most the smallest one's padding."""
    blocks = []
    for size in reversed(sizes):
        count, rows = divmod(rows, size)
        blocks += [size] * count
    return [*blocks, sizes[0]] if rows else blocks


def agreeing(weight: torch.Tensor) -> RowBlocks:
    """The sizes that agree with the first of REFERENCES which agrees with itself in every place."""
    generator = torch.Generator().manual_seed(weight.shape[0] * 31 + weight.shape[1])
    row = torch.randn(1, weight.shape[1], generator=generator).to(weight.dtype)
    tried = [size for size in SIZES if size == 1 or size * weight.shape[0] <= SUMS_MAX]
    results = {size: library_product(row.expand(size, -1).contiguous(), weight) for size in tried}
    reference = next(size for size in REFERENCES if size in results and _all_equal(results[size], results[size][:1]))
    return RowBlocks(tuple(size for size in tried if _all_equal(results[size], results[reference][:1])))


def _all_equal(rows: torch.Tensor, row: torch.Tensor) -> bool:
    return bool((rows == row).all())
