"""Set before anything is imported or drawn.

Triton reads TRITON_INTERPRET when it is first imported, and in a run of all tests that is long before the first
kernel test: where no GPU can be, kernels are to be interpreted, and that is said here.

Hypothesis has no deadline: how long an example takes says nothing on a machine that does other things as well.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("segue", deadline=None)
settings.load_profile("segue")

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
