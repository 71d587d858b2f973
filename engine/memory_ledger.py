"""Every byte an engine will take, before any is taken: what `segue memory` prints and a start is refused with.

Pure arithmetic on shapes. Tensors that live as long as the engine are counted exactly; what a step needs for a moment
is the largest set of tensors alive at once in its widest place (see `activation_bytes`); what libraries take beside it
are measured constants. Pages get what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.arch import ArchSpec
from engine.parallel import RankShape

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LedgerLine:
    name: str
    bytes_taken: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """`lines` are all but the pages; `capacity_bytes` is what the engine may take in all."""

    device: str
    capacity_bytes: int
    capacity_note: str
    lines: tuple[LedgerLine, ...]
    page_bytes: int
    pages: int
    block_size: int

    @property
    def bytes_taken(self) -> int:
        return sum(line.bytes_taken for line in self.lines) + self.pages * self.page_bytes

    @property
    def tokens(self) -> int:
        """How many tokens' K/V the pages hold."""
        return self.pages * self.block_size

    @property
    def fits(self) -> bool:
        return self.pages > 0 and self.bytes_taken <= self.capacity_bytes

    def render(self, tokens_each: int) -> str:
        """One line for each use; `tokens_each`: length of the sequences that are counted at the end."""
        pages_note = f"{self.pages} pages of {self.block_size} tokens, {self.page_bytes / MIB:.3f} MiB each"
        rows = [*self.lines, LedgerLine("KV pages", self.pages * self.page_bytes, pages_note)]
        rows.append(LedgerLine("total", self.bytes_taken, ""))
        rows.append(LedgerLine("may take", self.capacity_bytes, self.capacity_note))
        width = max(len(row.name) for row in rows)
        table = [f"{row.name:<{width}}  {row.bytes_taken / MIB:>12,.1f} MiB  {row.note}".rstrip() for row in rows]
        held = f"{self.tokens:,} tokens fit: {self.tokens // max(1, tokens_each):,} sequences of {tokens_each:,}"
        return "\n".join([f"memory of one instance on {self.device}", *table, held])


def plan_ledger(
    *,
    device: str,
    capacity_bytes: int,
    capacity_note: str,
    lines: tuple[LedgerLine, ...],
    page_bytes: int,
    block_size: int,
    pages_asked: int,
    page_budget_bytes: int,
) -> MemoryLedger:
    """Pages as asked for, or what a budget of their own holds, or (both 0) all that is left."""
    left = capacity_bytes - sum(line.bytes_taken for line in lines)
    pages = pages_asked or (page_budget_bytes or max(0, left)) // page_bytes
    return MemoryLedger(device, capacity_bytes, capacity_note, lines, page_bytes, pages, block_size)


def activation_bytes(spec: ArchSpec, shape: RankShape, tokens: int, item_bytes: int) -> int:
    """Of one step of `tokens`: the larger of its two wide places.

    MLP: residual, normed input, gate and up, their product, its projection. Attention: residual, normed input, qkv,
    rotated q, attention's output, its projection. Beside both: ids, positions and slots int64, one row of each rotary
    table in float32.
    """
    q_width = shape.heads * spec.head_dim
    qkv_width = q_width + 2 * shape.kv_heads * spec.head_dim
    mlp = 3 * spec.hidden + 3 * shape.intermediate
    attention = 3 * spec.hidden + qkv_width + 2 * q_width
    beside = 3 * 8 + len(spec.ropes) * spec.head_dim * 4
    return tokens * (max(mlp, attention) * item_bytes + beside)


def logits_bytes(spec: ArchSpec, rows: int, item_bytes: int, copies_float32: int) -> int:
    """The head's output and its float32 copies."""
    return rows * spec.vocab_rows * (item_bytes + 4 * copies_float32)
