"""Device functions of every sampler: stateless Gumbel noise (`segue_kernels.gumbel` says what it is), best pairs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """Murmur3's 32-bit finaliser on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def noise_row(seed_low, seed_high, position):
    """What `gumbel_noise` keys a row's noise by; every word uint32."""
    return mix(mix(mix(seed_low ^ 0x9E3779B9) ^ seed_high) ^ position)


@triton.jit
def noise_bits(row, index):
    return mix(mix(row + index * 0x9E3779B1) ^ row) >> 9


@triton.jit
def gumbel(row, index):
    """`gumbel_noise` of a `noise_row` at vocabulary indices `index` (uint32)."""
    uniform = (noise_bits(row, index).to(tl.float64) + 0.5) * 1.1920928955078125e-07
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def approximate_gumbel(row, index):
    """The same within 0.001, by float32 logarithms: a tenth of the time. Near 1, where -log(u) loses all its digits, by
    its series in 1 - u."""
    bits = noise_bits(row, index)
    uniform = (bits.to(tl.float32) + 0.5) * 1.1920928955078125e-07
    rest = ((8388607 - bits).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(tl.where(rest < 0.001953125, rest + 0.5 * rest * rest, -tl.log(uniform)))


@triton.jit
def better(value, index, other_value, other_index):
    """The larger value; among equals the lower index."""
    take = (other_value > value) | ((other_value == value) & (other_index < index))
    return tl.where(take, other_value, value), tl.where(take, other_index, index)


@triton.jit
def first_best(values, indices):
    """The largest of `values` (none NaN) and the lowest index that has it."""
    value = tl.max(values, 0)
    return value, tl.min(tl.where(values == value, indices, 2147483647), 0)
