"""Host numbers to the device without waiting for what it is doing.

A copy out of ordinary memory may wait for the whole queue before it, which undoes running ahead; one out of pinned
memory does not. Pinned blocks come from torch's caching allocator, which reuses one only when its copy has been made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

TORCH_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}


def upload(
    values: npt.NDArray[np.int64] | npt.NDArray[np.int32] | Sequence[int],
    device: torch.device,
    dtype: type[np.int64] | type[np.int32] = np.int64,
) -> torch.Tensor:
    """`values` as a tensor of `dtype` on `device`, in stream order. On a CPU it may share the memory of an array."""
    array = np.asarray(values, dtype=dtype)  # five times as fast from a list as torch.tensor
    if device.type == "cpu":
        return torch.from_numpy(array)
    staged = torch.empty(array.shape, dtype=TORCH_DTYPES[array.dtype], pin_memory=True)
    staged.numpy()[...] = array
    return staged.to(device, non_blocking=True)
