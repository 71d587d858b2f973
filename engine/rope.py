"""Rotary position embedding (Su et al. 2021) in the half-split layout, with the scalings of RopeSpec.

For pair i of a head (elements i and i + dim/2) at position p: angle = p * f_i, and
(x_i, x_{i+dim/2}) -> (x_i cos - x_{i+dim/2} sin, x_{i+dim/2} cos + x_i sin).
"""

from __future__ import annotations

import math

import torch

from engine.arch import RopeSpec


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """f_i for every pair: float32 [head_dim / 2]."""
    base = 1.0 / (spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if spec.frequency_divisors:
        base = base / torch.tensor(spec.frequency_divisors, dtype=torch.float32)
    if spec.kind == "linear":
        return base / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, base)
    if spec.kind == "yarn":
        return _yarn(spec, base, head_dim)
    return base


def _llama3(spec: RopeSpec, base: torch.Tensor) -> torch.Tensor:
    """Wavelengths above original/low are divided by `factor`, below original/high kept, blends between."""
    wavelengths = 2 * math.pi / base
    turns = spec.original_max_position / wavelengths
    smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * base / spec.factor + smooth * base


def _yarn(spec: RopeSpec, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Interpolate pairs that turn fewer than beta_slow times over the trained length, keep those above beta_fast."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(spec.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_of(spec.beta_fast), pair_of(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return base / spec.factor * interpolated + base * (1 - interpolated)


def rope_table(spec: RopeSpec, head_dim: int, positions_max: int, device: torch.device) -> torch.Tensor:
    """[positions_max, head_dim] float32: cosines of all pairs, then sines."""
    frequencies = inverse_frequencies(spec, head_dim)
    angles = torch.outer(torch.arange(positions_max, dtype=torch.float32), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * spec.attention_factor
    return table.to(device)
