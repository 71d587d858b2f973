"""SHA-256 of weight files, remembered under the user's cache directory by (path, size, modification time)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

CACHE_DIRECTORY = Path("~/.cache/segue/digests")
_CHUNK_BYTES = 1 << 22


def weights_digest(files: Sequence[Path], cache: Path = CACHE_DIRECTORY) -> bytes:
    """One digest (32 bytes) over the contents of `files` in the given order."""
    joined = hashlib.sha256()
    for file in files:
        joined.update(file_digest(file, cache))
    return joined.digest()


def file_digest(file: Path, cache: Path = CACHE_DIRECTORY) -> bytes:
    """SHA-256 of one file. A cache that cannot be written costs only time."""
    status = file.stat()
    key = hashlib.sha256(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()
    entry = cache.expanduser() / key
    try:
        known = entry.read_bytes()
        if len(known) == hashlib.sha256().digest_size:
            return known
    except OSError:
        known = b""
    digest = _hash(file)
    _remember(entry, digest)
    return digest


def _hash(file: Path) -> bytes:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()


def _remember(entry: Path, digest: bytes) -> None:
    """Whole or not at all: workers of one host start together and share the cache."""
    partial = entry.with_suffix(f".{os.getpid()}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(digest)
        partial.replace(entry)
    except OSError:
        return
