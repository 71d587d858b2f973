"""Row state on the device: scattered words, and the gather into batch order."""

from __future__ import annotations

import torch
from segue_kernels.decode_state import (
    BatchBuffers,
    begin_step,
    begin_step_reference,
    scatter_words,
    scatter_words_reference,
)


def test_scatter_changes_the_named_words_only(device: torch.device) -> None:
    target = torch.arange(1000, dtype=torch.int32, device=device)
    offsets = torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:300].int()
    updates = torch.stack([offsets, -offsets - 1], dim=1).to(device)
    expected = target.clone()
    scatter_words_reference(expected, updates)
    scatter_words(target, updates)
    assert torch.equal(target, expected)
    assert int((target < 0).sum()) == 300


def test_begin_step_gathers_rows_into_batch_order(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, page_size = 72, 4
    embedding = torch.randn(11, hidden, generator=generator).to(device)
    tokens = torch.tensor([3, 10, 0], dtype=torch.int32, device=device)
    positions = torch.tensor([3, 4, 300], dtype=torch.int32, device=device)
    tables = torch.randint(0, 99, (3, 80), generator=generator, dtype=torch.int32).to(device)
    rows = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=device)

    rope = torch.randn(301, 10, generator=generator).to(device)

    def buffers() -> BatchBuffers:
        batch = BatchBuffers.allocate(4, 80, hidden, 10, torch.float32, device)
        for name in BatchBuffers.__dataclass_fields__:
            getattr(batch, name).fill_(-5)
        return batch

    expected, batch = buffers(), buffers()
    begin_step_reference(rows, tokens, positions, tables, embedding, rope, expected, page_size)
    begin_step(rows, tokens, positions, tables, embedding, rope, batch, page_size)
    for name in BatchBuffers.__dataclass_fields__:
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name
    assert batch.seq_lens.tolist() == [301, 0, 4, 5]
    assert batch.slots[1] == -1
    assert (batch.tables[1] == -5).all()
