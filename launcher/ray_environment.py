"""Environment that Ray reads while it is being imported, and hands on to its daemons and to every actor."""

from __future__ import annotations

import os
import secrets

from launcher.processes import thread_environment


def prepare_ray_environment(threads: int) -> None:
    """Call before the first `import ray`. Access needs a token made for this run: without one in the environment Ray
    would write a lasting one to ~/.ray, and without any its ports would take commands from anybody who reaches them."""
    os.environ |= thread_environment(threads)
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
