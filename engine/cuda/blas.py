"""Which library multiplies matrices. A captured graph keeps what was chosen at its capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

CUBLAS_MIN = 128
"""Rows of a product from which on cuBLAS's own choice of kernel is better than cuBLASLt's."""


@contextlib.contextmanager
def blas_library(name: str) -> Iterator[None]:
    """Prefer "cublas", "cublaslt" or torch's "default". Without a GPU: nothing."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def library_for(tokens: int) -> str:
    """The faster one for products of so many rows. All four of a layer of 8B, H200, us, cublas / cublaslt: 64 rows
    124 / 123, 96 131 / 125, 128 134 / 140, 192 157 / 164, 256 184 / 203, 512 309 / 334, 1024 652 / 659."""
    return "cublaslt" if tokens < CUBLAS_MIN else "cublas"
