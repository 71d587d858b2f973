"""A POSIX shared-memory segment that holds a page pool, and the mapping of somebody else's.

    [page 0][page 1]...[page n-1][trailer: nonce, padded to 4 KiB]

Plain files in /dev/shm with mmap rather than `multiprocessing.shared_memory`: before Python 3.13 that registers every
mapping with a resource tracker, which unlinks the owner's segment when a mere reader exits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from pathlib import Path

from kvstore.connectors.base import MoverError
from segue.errors import ConfigError
from segue.handoff_messages import SegmentDescriptor

SHM_DIR = Path("/dev/shm")
TRAILER_BYTES = 4096
NONCE_BYTES = 32


class OwnedSegment:
    """Created, and unlinked by `close`, by the target. `pages` is the pool's memory: writable, `pages * page_bytes`."""

    def __init__(self, name: str, pages: int, page_bytes: int) -> None:
        """Raises ConfigError when /dev/shm has no room or the name is taken."""
        self._path = SHM_DIR / name
        size = pages * page_bytes
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._map = _create(self._path, size + TRAILER_BYTES)
        self._map[size : size + NONCE_BYTES] = nonce
        self._view = memoryview(self._map)
        self.pages = self._view[:size]
        self.descriptor = SegmentDescriptor(
            mover="shared_memory", location=name, pages=pages, page_bytes=page_bytes, nonce_offset=size, nonce=nonce
        )

    def close(self) -> None:
        """Unlink the name. The memory itself goes when the last view of it does: an engine may still hold one."""
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(BufferError):
            self.pages.release()
            self._view.release()
            self._map.close()


def _create(path: Path, size: int) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"shared memory {path}: {error.strerror}") from error
    try:
        # Allocated now: a sparse file would end in SIGBUS at the first write that finds no memory.
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(f"shared memory {path}: {size} bytes: {error.strerror}") from error
    finally:
        os.close(descriptor)


class MappedSegment:
    """A peer's segment, mapped for writing after the nonce was found where the peer says it stands."""

    def __init__(self, descriptor: SegmentDescriptor) -> None:
        """Raises MoverError when the memory is not there, too small, or not the peer's."""
        size = descriptor.pages * descriptor.page_bytes
        if "/" in descriptor.location or descriptor.nonce_offset < size:
            raise MoverError(f"malformed segment descriptor {descriptor.location!r}")
        self._map = _map(SHM_DIR / descriptor.location, descriptor.nonce_offset + len(descriptor.nonce))
        found = self._map[descriptor.nonce_offset : descriptor.nonce_offset + len(descriptor.nonce)]
        if found != descriptor.nonce or not descriptor.nonce:
            self._map.close()
            raise MoverError(f"shared memory {descriptor.location} is not the peer's: the nonce differs")
        self.pages = memoryview(self._map)[:size]

    def close(self) -> None:
        """Unmap, unless a copy in another thread still looks at it: then its end unmaps."""
        with contextlib.suppress(BufferError):
            self.pages.release()
            self._map.close()


def _map(path: Path, size: int) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise MoverError(f"shared memory {path.name} cannot be opened: {error.strerror}") from error
    try:
        if os.fstat(descriptor).st_size < size:
            raise MoverError(f"shared memory {path.name} is smaller than described")
        # Populated now, off the loop: 70 MB written through a fresh mapping take 116 ms with faults, 8 ms without.
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
