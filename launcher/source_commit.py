"""Which sources a result was made by."""

from __future__ import annotations

import subprocess
from pathlib import Path


def source_commit() -> str:
    """Short hash of the checkout that this code runs from, `+` behind it where files were changed; "unknown" where it
    is installed, or git is not."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return "unknown"
    head, changed = _git(root, "rev-parse", "--short", "HEAD"), _git(root, "status", "--porcelain", "-uno")
    return f"{head}+" if head and changed else head or "unknown"


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
