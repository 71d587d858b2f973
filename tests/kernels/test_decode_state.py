"""The gather that opens a decode step."""

from __future__ import annotations

import torch
from segue_kernels.decode_state import BatchBuffers, Places, begin_step, begin_step_reference


def test_begin_step_gathers_rows_into_batch_order(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, page_size = 72, 4
    embedding = torch.randn(11, hidden, generator=generator).to(device)
    tokens = torch.randint(0, 11, (3, 301), generator=generator).to(device)
    tables = torch.randint(0, 99, (3, 80), generator=generator, dtype=torch.int32).to(device)
    places = Places.of(torch.zeros(Places.WORDS, 4, dtype=torch.int32, device=device))
    places.rows.copy_(torch.tensor([2, -1, 0, 1]))
    places.positions.copy_(torch.tensor([300, 77, 3, 4]))
    rope = torch.randn(301, 10, generator=generator).to(device)

    def buffers() -> BatchBuffers:
        batch = BatchBuffers.allocate(4, 80, hidden, 10, torch.float32, device)
        for name in BatchBuffers.__dataclass_fields__:
            getattr(batch, name).fill_(-5)
        return batch

    expected, batch = buffers(), buffers()
    begin_step_reference(places, tokens, tables, embedding, rope, expected, page_size)
    begin_step(places, tokens, tables, embedding, rope, batch, page_size)
    for name in BatchBuffers.__dataclass_fields__:
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name
    assert batch.seq_lens.tolist() == [301, 0, 4, 5]
    assert batch.slots[1] == -1
    assert (batch.tables[1] == -5).all()
