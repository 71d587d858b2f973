"""Stateless Gumbel noise keyed by (seed, position): the eager definition that every sampler reproduces bit for bit.

All arithmetic is on 32-bit words modulo 2^32 (held in int64 here, native uint32 in kernels):

    mix(x)  = murmur3's finaliser: x ^= x>>16; x *= 0x85EBCA6B; x ^= x>>13; x *= 0xC2B2AE35; x ^= x>>16
    row     = mix(mix(mix(seed_low ^ 0x9E3779B9) ^ seed_high) ^ position)
    word_v  = mix(mix(row + v * 0x9E3779B1) ^ row)                   for vocabulary index v
    u_v     = ((word_v >> 9) + 0.5) * 2^-23                          in (0, 1), exact in float32
    noise_v = float32(-log(-log(float64(u_v))))

The logarithms are taken in float64 and rounded once: libraries differ in the last bits of a logarithm, and after
rounding to float32 such a difference shows in about one of 2^28 values instead of every tenth.

The token is argmax_v(logits_v / temperature + noise_v) over the tokens left by the filters (Gumbel-max trick,
Maddison et al. 2014), so it depends on logits, seed and position alone.
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF


def mix(x: torch.Tensor) -> torch.Tensor:
    """Murmur3's 32-bit finaliser on int64 tensors that hold 32-bit words."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _WORD
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise of shape [rows, vocab_size], float32. `seeds` int64 [rows] (64-bit patterns), `positions` int64 [rows]."""
    low, high = seeds & _WORD, (seeds >> 32) & _WORD
    row = mix(mix(mix(low ^ 0x9E3779B9) ^ high) ^ (positions & _WORD))[:, None]
    index = torch.arange(vocab_size, device=seeds.device, dtype=torch.int64)[None, :]
    word = mix(mix((row + index * 0x9E3779B1) & _WORD) ^ row)
    uniform = ((word >> 9).to(torch.float64) + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_().to(torch.float32)
