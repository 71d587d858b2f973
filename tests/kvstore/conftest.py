"""Tests of whole pairs run real workers: their rig lies with the tests of the workers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "worker_runtime"))
