"""From a configuration to an engine on memory that peers may write."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.connectors.device_memory import DevicePages
from kvstore.connectors.shared_segment import OwnedSegment
from segue.config import WorkerConfig
from segue.ids import InstanceRef
from segue.manifest import Role
from worker_runtime.engine_port import EnginePort

if TYPE_CHECKING:
    from engine.engine import ModelInfo


class LoadedEngine:
    """`pages` is the pool's memory, None where it is not in host memory; `segment` is set where peers may write it;
    `device_pages` where pages are handed over within GPU memory."""

    def __init__(
        self,
        engine: EnginePort,
        pages: memoryview | None,
        segment: OwnedSegment | None,
        device_pages: DevicePages | None = None,
    ) -> None:
        self.engine = engine
        self.device_pages = device_pages
        self.pages = pages
        self.segment = segment


LoadEngine = Callable[[WorkerConfig, InstanceRef], LoadedEngine]


def page_memory(
    config: WorkerConfig, ref: InstanceRef, pages: int, page_bytes: int
) -> tuple[memoryview, OwnedSegment | None]:
    """A decode instance's pool is a shared segment unless pages come over TCP; everybody else's is private memory."""
    if config.role is Role.DECODE and config.scheduler.kv_connector != "tcp":
        name = f"{config.shm_prefix}-{config.name}-{os.getpid()}-{ref.incarnation % 10**9}"
        segment = OwnedSegment(name, pages, page_bytes)
        return segment.pages, segment
    return memoryview(mmap.mmap(-1, pages * page_bytes)), None


def load_torch_engine(config: WorkerConfig, ref: InstanceRef) -> LoadedEngine:
    """Raises ConfigError for anything wrong with the model, the options or the memory."""
    from engine.engine import load_engine, read_model  # torch takes seconds to import: a bad config should not

    info = read_model(config.model, config.engine, config.scheduler)
    if info.device.type != "cpu":
        return _on_device(config, info)
    pages, segment = page_memory(config, ref, info.pages_total, info.layout.page_bytes)
    try:
        engine = load_engine(config.model, config.engine, config.scheduler, page_buffer=pages, info=info)
    except BaseException:
        if segment is not None:
            segment.close()
        raise
    return LoadedEngine(engine, pages, segment)


def _on_device(config: WorkerConfig, info: ModelInfo) -> LoadedEngine:
    """Pages in device memory. An aggregated instance hands nothing over and needs no connector."""
    from engine.engine import load_engine

    if config.role is Role.AGGREGATED:
        return LoadedEngine(load_engine(config.model, config.engine, config.scheduler, info=info), None, None)
    engine = load_engine(
        config.model, config.engine, config.scheduler, info=info, pages_trailer_bytes=DevicePages.TRAILER_BYTES
    )
    pages = DevicePages(engine.pages.data_ptr(), info.pages_total, info.layout.page_bytes)
    return LoadedEngine(engine, None, None, pages)
