"""Triton reads TRITON_INTERPRET when it is first imported, and in a run of all tests that is long before the first
kernel test: where no GPU can be, kernels are to be interpreted, and that is said here, before anything is imported."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
