"""Programmatic dependent launch (PDL): a kernel starts while its predecessor drains, and waits before it reads.

Every kernel here takes a constexpr `PDL` and is launched with `**launch_options(pdl)`. With PDL on it (1) tells its own
dependents to start, (2) reads what no recent kernel writes (weights), (3) calls `gdc_wait`, which returns when all
earlier kernels of the chain have finished, and (4) reads activations. Rules that keep this sound:

- every program of every kernel in the chain waits, also programs without work: "finished" is then transitive;
- nothing is written before the wait; only constants are read before it.

Triton's interpreter and GPUs before compute capability 9.0 run with PDL off.
"""

from __future__ import annotations

import torch


def supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(pdl: bool) -> dict[str, bool]:
    """Keyword arguments of a Triton launch. Empty when off, as the interpreter knows no such option."""
    return {"launch_pdl": True} if pdl else {}
