"""Capture of a family of CUDA graphs that share one memory pool, largest first."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Key = TypeVar("Key")


@torch.inference_mode()
def captured(keys: Sequence[Key], enqueue: Callable[[Key], None]) -> dict[Key, torch.cuda.CUDAGraph]:
    """A graph of `enqueue(key)` for each key; keys come in growing size. Smaller graphs fit into the memory of larger
    ones, so the last is captured first. `enqueue` runs for real once before, on whatever its inputs hold: that compiles
    kernels and makes library workspaces, neither of which is allowed inside a capture."""
    graphs: dict[Key, torch.cuda.CUDAGraph] = {}
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    gc.collect()
    for key in reversed(keys):
        with torch.cuda.stream(stream):
            enqueue(key)
        stream.synchronize()
        graphs[key] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[key], pool=pool, stream=stream):
            enqueue(key)
    torch.cuda.current_stream().wait_stream(stream)
    return graphs
