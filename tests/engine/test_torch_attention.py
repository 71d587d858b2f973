"""The torch backend against attention written out by its definition, over ragged batches and long tails."""

import pytest
import torch

from engine.attention.base import AttentionBatch, AttentionShape
from engine.attention.torch_backend import TorchBackend, rows_by_length

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 6, 2, 10, 4, 3
TOLERANCE_FP32 = 2e-5


def by_definition(q, keys, values, scale, window, soft_cap):
    """q [queries, heads, dim] are the last positions of keys, values [length, kv_heads, dim]; float64."""
    queries, length = q.shape[0], keys.shape[0]
    out = torch.empty(q.shape, dtype=torch.float64)
    for index in range(queries):
        position = length - queries + index
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = keys[first : position + 1, kv_head].double() @ q[index, head].double() * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            out[index, head] = scores.softmax(0) @ values[first : position + 1, kv_head].double()
    return out


def run(seq_lens, query_lens, window, soft_cap):
    """Errors of each row. Pages are NaN where no row has K/V."""
    generator = torch.Generator().manual_seed(len(seq_lens))
    blocks = [-(-length // BLOCK) for length in seq_lens]
    pages = torch.full((sum(blocks) + 1, LAYERS, 2, KV_HEADS, BLOCK, DIM), float("nan"))
    tables = torch.zeros((len(seq_lens), max(blocks)), dtype=torch.int32)
    free = torch.randperm(sum(blocks), generator=generator).tolist()
    kv = []
    for row, length in enumerate(seq_lens):
        own = [free.pop() for _ in range(blocks[row])]
        tables[row, : len(own)] = torch.tensor(own)
        tensors = torch.randn(2, length, KV_HEADS, DIM, generator=generator)
        for position in range(length):
            pages[own[position // BLOCK], 1, :, :, position % BLOCK] = tensors[:, position]
        kv.append(tensors)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    q = torch.randn(int(starts[-1]), HEADS, DIM, generator=generator)
    shape = AttentionShape(HEADS, KV_HEADS, DIM, BLOCK, torch.float32, torch.device("cpu"))
    backend = TorchBackend(shape)
    batch = AttentionBatch(
        tables, torch.tensor(seq_lens).int(), starts, max(query_lens), max(seq_lens), max(query_lens) == 1
    )
    out = backend.forward(backend.plan(batch), 1, q, pages, scale=0.3, window=window, soft_cap=soft_cap)
    for row, (keys, values) in enumerate(kv):
        span = slice(int(starts[row]), int(starts[row + 1]))
        expected = by_definition(q[span], keys, values, 0.3, window, soft_cap)
        yield (out[span].double() - expected).abs().max().item()


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 7, 1000])
@pytest.mark.parametrize(
    "seq_lens,query_lens",
    [
        ([1], [1]),
        ([5, 4, 3, 17], [1, 1, 1, 1]),
        ([700, 3, 40, 690, 2], [1, 1, 1, 1, 1]),
        ([13], [13]),
        ([13, 8, 21], [5, 8, 1]),
        ([150, 66], [131, 66]),
    ],
)
def test_equals_the_definition(seq_lens, query_lens, window, soft_cap):
    assert all(error <= TOLERANCE_FP32 for error in run(seq_lens, query_lens, window, soft_cap))


def test_rows_of_like_length_share_a_group():
    assert rows_by_length([5000, 10, 4000, 2400, 12]) == [[0, 2, 3], [4, 1]]
    assert rows_by_length([30, 1, 200]) == [[2, 0, 1]]
