"""Bandwidth of a whole-page hand-off through shared memory, beside memcpy of the same bytes in the same run.

The target is another process: it owns the segment, this process maps it after the nonce was found, and hands over
pages as a prefill instance does. Floor: a page is read and written once, as memcpy reads and writes it, so the goal is
80 % of memcpy over the same pieces: one piece in order, single pages when they are scattered (memcpy itself is slower
for pieces below the last cache level's size: they are written through the caches). They alternate, first one and then
the other, so that a busy machine slows both; medians of `--rounds`, and median and worst of the ratios of neighbouring
rounds. The first round is a row of its own: it shows whether page faults are paid when the peers meet or by the first
request.

A move wakes a thread and is waited for: on a machine with more work than cores both wait for a core as well, which
memcpy in a thread that runs already does not. The ratios by CPU time leave that out: what the move itself costs.

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
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

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


class Seconds(NamedTuple):
    """Of one piece of work; `cpu` of all threads of this process."""

    wall: float
    cpu: float


def seconds_of(work: Callable[[], None]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def move(mover: SharedMemoryMover, done: threading.Event, op: int, pages: list[tuple[int, int]]) -> None:
    """From the decision to move until every byte is visible at the target."""
    done.clear()
    mover.send(op, TARGET, AttemptRef("bench", op), pages)
    done.wait()
    (result,) = mover.poll()
    assert result.moved == len(pages), result.error


def copy_runs(target: np.ndarray, source: np.ndarray, runs: list[tuple[int, int, int]]) -> None:
    """The same pieces between two private buffers `[pages, page_bytes]`, without queue, thread or other process."""
    for first, to, count in runs:
        target[to : to + count] = source[first : first + count]


def measure(pages: int, page_bytes: int, rounds: int, scattered: bool) -> tuple[list[Seconds], list[Seconds]]:
    """(Moves, memcpys) by round, the very first one included."""
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
    moves: list[Seconds] = []
    copies: list[Seconds] = []
    for op in range(rounds):
        if op % 2:
            copies.append(seconds_of(partial(copy_runs, private, source, runs)))
        moves.append(seconds_of(partial(move, mover, done, op, table)))
        if op % 2 == 0:
            copies.append(seconds_of(partial(copy_runs, private, source, runs)))
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
        rows.add(shape, "shm first hand-off", total / moves[0].wall, "GB/s")
        rows.add(shape, "shm hand-off", total / statistics.median(move.wall for move in moves[1:]), "GB/s")
        rows.add(shape, "memcpy", total / statistics.median(copy.wall for copy in copies[1:]), "GB/s")
        pairs = list(zip(moves[1:], copies[1:], strict=True))
        for clock, shares in (
            ("", [copy.wall / move.wall for move, copy in pairs]),
            (", CPU time", [copy.cpu / move.cpu for move, copy in pairs]),
        ):
            rows.add(shape, f"share of memcpy{clock}", 100 * statistics.median(shares), "%")
            rows.add(shape, f"worst share of memcpy{clock}", 100 * min(shares), "%")


if __name__ == "__main__":
    main()
