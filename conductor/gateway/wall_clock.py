"""The two clocks of the gateway, read here and handed down."""

from __future__ import annotations

import time


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


def unix_seconds() -> int:
    return int(time.time())
