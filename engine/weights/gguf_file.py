"""GGUF files: metadata, and tensors dequantized one at a time by gguf's own routines."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize

from engine.weights.gguf_header import parse_header

_LAYER_NAMES = {
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "o_bias": "attn_output.bias",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
    "attention_norm": "attn_norm.weight",
    "attention_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
}
_MODEL_NAMES = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
ROPE_DIVISORS = "rope_freqs.weight"


class GgufFile:
    """An open (memory-mapped) GGUF file. The header is parsed here: gguf's own reader makes an array of every string of
    the vocabulary, which takes seconds where this takes a tenth."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        header = parse_header(self._bytes, str(path))
        self.metadata = header.metadata
        self.tensors = header.tensors
        self._data_start = header.data_start

    def dequantized(self, name: str) -> torch.Tensor:
        """float32, shaped [out, in] (GGUF lists dimensions fastest first)."""
        info = self.tensors[name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[info.kind]
        row_bytes = info.shape[-1] // block * block_bytes
        start = self._data_start + info.offset
        rows = math.prod(info.shape[:-1])
        raw = self._bytes[start : start + rows * row_bytes].reshape(*info.shape[:-1], row_bytes)
        values = dequantize(raw, info.kind)
        return torch.from_numpy(np.array(values, dtype=np.float32, copy=None if values.flags.writeable else True))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape


class GgufReader:
    """CheckpointReader over a GgufFile. `permuted`: Q and K rows are stored for interleaved RoPE."""

    def __init__(self, file: GgufFile, *, permuted: bool, heads: int, kv_heads: int) -> None:
        self.source = str(file.path)
        self._file = file
        self._heads_of = {"q": heads, "q_bias": heads, "k": kv_heads, "k_bias": kv_heads} if permuted else {}

    def tensor_name(self, kind: str, layer: int) -> str:
        return _MODEL_NAMES[kind] if kind in _MODEL_NAMES else f"blk.{layer}.{_LAYER_NAMES[kind]}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._file.shape(name) for name in self._file.tensors if name != ROPE_DIVISORS}

    def read(self, name: str, kind: str) -> torch.Tensor:
        tensor = self._file.dequantized(name)
        heads = self._heads_of.get(kind)
        return tensor if heads is None else unpermute(tensor, heads)


def unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows (2i, 2i+1) of each head back to (i, i + dim/2): llama.cpp's conversion undone. Any trailing shape."""
    split = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return split.swapaxes(1, 2).reshape(tensor.shape)
