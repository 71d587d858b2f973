"""Bandwidth of a whole-page hand-off through shared memory, beside memcpy of the same bytes in the same run.

The target is another process: it owns the segment, this process maps it after the nonce was found, and hands over
pages as a prefill instance does. Floor: a page is read and written once, as memcpy reads and writes it, so the goal is
80 % of memcpy over the same pieces: one piece in order, single pages when they are scattered (memcpy itself is slower
for pieces below the last cache level's size: they are written through the caches). They alternate, so that a busy
machine slows both; medians of `--rounds`, and the median of the ratios of neighbouring rounds. The first round is a row
of its own: it shows whether page faults are paid when the peers meet or by the first request.

    python benchmarks/handoff_shm.py [--pages 96] [--page-kib 720] [--rounds 40]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import threading
import time
from multiprocessing.connection import Connection

import numpy as np
from result_rows import RESULTS, ResultFile, cpu_device

from kvstore.connectors.process_identity import this_process
from kvstore.connectors.shared_memory import SharedMemoryMover, page_runs
from kvstore.connectors.shared_segment import OwnedSegment
from segue.ids import AttemptRef, InstanceRef

TARGET = InstanceRef("target", 1)
SOURCE_VALUE = 7


def serve_target(pages: int, page_bytes: int, pipe: Connection) -> None:
    """Owns the pool; says at the end how many of its bytes are as they were sent."""
    segment = OwnedSegment(f"segue-bench-{os.getpid()}", pages, page_bytes)
    pipe.send(([segment.descriptor], this_process()))
    pipe.recv()
    pool = np.frombuffer(segment.pages, dtype=np.uint8)
    pipe.send(int(np.count_nonzero(pool == SOURCE_VALUE)))
    del pool
    segment.close()


def seconds_of_move(mover: SharedMemoryMover, done: threading.Event, op: int, pages: list[tuple[int, int]]) -> float:
    """From the decision to move until every byte is visible at the target."""
    done.clear()
    start = time.perf_counter()
    mover.send(op, TARGET, AttemptRef("bench", op), pages)
    done.wait()
    elapsed = time.perf_counter() - start
    (result,) = mover.poll()
    assert result.moved == len(pages), result.error
    return elapsed


def seconds_of_memcpy(target: np.ndarray, source: np.ndarray, runs: list[tuple[int, int, int]]) -> float:
    """The same pieces between two private buffers `[pages, page_bytes]`, without queue, thread or other process."""
    start = time.perf_counter()
    for first, to, count in runs:
        target[to : to + count] = source[first : first + count]
    return time.perf_counter() - start


def measure(pages: int, page_bytes: int, rounds: int, scattered: bool) -> tuple[list[float], list[float]]:
    """Seconds of (moves, memcpys) by round, the very first one included."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve_target, args=(pages, page_bytes, there))
    child.start()
    offers, process = here.recv()
    own = memoryview(bytearray([SOURCE_VALUE]) * (pages * page_bytes))
    done = threading.Event()
    mover = SharedMemoryMover(own, page_bytes, on_done=done.set)
    mover.register(TARGET, process, offers)
    targets = list(range(pages))
    if scattered:
        random.Random(0).shuffle(targets)
    table = list(zip(range(pages), targets, strict=True))
    source = np.frombuffer(own, dtype=np.uint8).reshape(pages, page_bytes)
    private = np.zeros_like(source)
    runs = page_runs(table, pages)
    moves, copies = [], []
    for op in range(rounds):
        moves.append(seconds_of_move(mover, done, op, table))
        copies.append(seconds_of_memcpy(private, source, runs))
    here.send("count")
    assert here.recv() == pages * page_bytes, "the target does not hold what was sent"
    child.join()
    mover.close()
    return moves, copies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=96)
    parser.add_argument("--page-kib", type=int, default=720, help="720: a 16-token fp32 page of SmolLM2-135M")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    command = f"python benchmarks/handoff_shm.py --pages {options.pages} --page-kib {options.page_kib}"
    rows = ResultFile(RESULTS / "handoff.csv", device=cpu_device(len(os.sched_getaffinity(0))), command=command)
    total = options.pages * options.page_kib * 1024 / 1e9
    # GB are 1e9 bytes moved, read and write counted once.
    for scattered in (False, True):
        moves, copies = measure(options.pages, options.page_kib * 1024, options.rounds + 1, scattered)
        order = "scattered" if scattered else "in order"
        shape = f"{options.pages} x {options.page_kib} KiB {order}, median of {options.rounds}"
        rows.add(shape, "shm first hand-off", total / moves[0], "GB/s")
        rows.add(shape, "shm hand-off", total / statistics.median(moves[1:]), "GB/s")
        rows.add(shape, "memcpy", total / statistics.median(copies[1:]), "GB/s")
        shares = [copy / move for move, copy in zip(moves[1:], copies[1:], strict=True)]
        rows.add(shape, "share of memcpy", 100 * statistics.median(shares), "%")


if __name__ == "__main__":
    main()
