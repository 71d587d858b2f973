"""These tests run on a GPU where there is one, otherwise in Triton's interpreter, chosen before triton is imported."""

from __future__ import annotations

import os
import sys

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton.language" in sys.modules:
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set: kernels cannot be interpreted")
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    torch.set_num_threads(1)
    return torch.device("cuda" if HAS_GPU else "cpu")
