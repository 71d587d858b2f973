"""Bandwidth of a whole-page hand-off over TCP on loopback, beside a raw socket in the same run.

Two processes, one pool each. The raw socket does the least that can be done: `sendmsg` from the source's pages, and
`recv_into` straight into the target's, blocking, without frames, digests or anybody to ask. Both are measured at the
source, from the first call until the target has said that everything is there; they alternate, so that a busy machine
slows both, and the medians are compared. Goal: 60 %.

Floor: loopback copies every byte twice (into the kernel and out of it), a digest reads it once more on each side at
some 10 GB/s from memory; with a copy at 5 GB/s per side that is 1 / (1 + 5 / 10) = 67 % of raw where both sides work
at once. Pages are larger than a second-level cache, so the digest reads them from memory again.

    python benchmarks/handoff_tcp.py [--pages 96] [--page-kib 720] [--rounds 30]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
from result_rows import RESULTS, ResultFile, cpu_device

from kvstore.connectors.process_identity import this_process
from kvstore.connectors.tcp import TcpMover
from segue.ids import AttemptRef, InstanceRef

SOURCE, TARGET = InstanceRef("source", 1), InstanceRef("target", 1)
SOURCE_VALUE = 7
ASK_CPU = "CPU time"
RAW_PIECES = 4
"""Pages of one raw sendmsg; more or fewer make no difference to it."""


def serve_target(pages: int, page_bytes: int, pipe: Connection) -> None:
    """Lends the whole pool for each round of the mover; receives raw rounds in a thread of its own."""
    pool = memoryview(bytearray(pages * page_bytes))
    mover = TcpMover(TARGET, pool, page_bytes, listen_host="127.0.0.1")
    mover.register(SOURCE, this_process(), [])
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((mover.describe(), this_process(), listener.getsockname()))
    raw, _ = listener.accept()
    threading.Thread(target=receive_raw, args=(raw, pool), daemon=True).start()
    while (attempt := pipe.recv()) is not None:
        if attempt == ASK_CPU:
            pipe.send(time.process_time())
            continue
        mover.fence(SOURCE, AttemptRef("bench", attempt - 1))
        mover.receive(SOURCE, AttemptRef("bench", attempt), range(pages))
        pipe.send("lent")
    pipe.send(int(np.count_nonzero(np.frombuffer(pool, dtype=np.uint8) == SOURCE_VALUE)))
    mover.close()
    raw.close()
    listener.close()


def receive_raw(sock: socket.socket, pool: memoryview) -> None:
    while True:
        have = 0
        while have < len(pool):
            count = sock.recv_into(pool[have:])
            if count == 0:
                return
            have += count
        sock.sendall(b"!")


def seconds_of_move(mover: TcpMover, done: threading.Event, op: int, table: list[tuple[int, int]]) -> float:
    done.clear()
    start = time.perf_counter()
    mover.send(op, TARGET, AttemptRef("bench", op), table)
    done.wait()
    elapsed = time.perf_counter() - start
    (result,) = mover.poll()
    assert result.moved == len(table), result.error
    return elapsed


def seconds_of_raw(sock: socket.socket, own: memoryview, page_bytes: int) -> float:
    start = time.perf_counter()
    size = RAW_PIECES * page_bytes
    for first in range(0, len(own), size):
        piece = own[first : first + size]
        while piece:
            piece = piece[sock.sendmsg([piece]) :]
    assert sock.recv(1) == b"!"
    return time.perf_counter() - start


class Round(NamedTuple):
    """One way over all pages: seconds on the clock, and of CPU at both ends together."""

    wall_s: float
    cpu_s: float


def timed(pipe: Connection, way: Callable[[], float]) -> Round:
    before_s = cpu_s_of_both(pipe)
    wall_s = way()
    return Round(wall_s, cpu_s_of_both(pipe) - before_s)


def cpu_s_of_both(pipe: Connection) -> float:
    pipe.send(ASK_CPU)
    return float(pipe.recv()) + time.process_time()


def measure(pages: int, page_bytes: int, rounds: int) -> tuple[list[Round], list[Round]]:
    """(moves, raw) by round, alternating; the first round of each, which touches memory, is left out."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve_target, args=(pages, page_bytes, there))
    child.start()
    offers, process, raw_address = here.recv()
    own = memoryview(bytearray([SOURCE_VALUE]) * (pages * page_bytes))
    done = threading.Event()
    mover = TcpMover(SOURCE, own, page_bytes, on_done=done.set)
    mover.register(TARGET, process, offers)
    raw = socket.create_connection(raw_address)
    targets = list(range(pages))
    random.Random(0).shuffle(targets)
    table = list(zip(range(pages), targets, strict=True))
    moves, raws = [], []
    for op in range(1, rounds + 2):
        here.send(op)
        here.recv()
        moves.append(timed(here, lambda op=op: seconds_of_move(mover, done, op, table)))  # type: ignore[misc]
        raws.append(timed(here, lambda: seconds_of_raw(raw, own, page_bytes)))
    here.send(None)
    assert here.recv() == pages * page_bytes, "the target does not hold what was sent"
    child.join()
    mover.close()
    raw.close()
    return moves[1:], raws[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=96)
    parser.add_argument("--page-kib", type=int, default=720, help="720: a 16-token fp32 page of SmolLM2-135M")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    size = f"--pages {options.pages} --page-kib {options.page_kib}"
    command = f"python benchmarks/handoff_tcp.py {size} --rounds {options.rounds}"
    rows = ResultFile(RESULTS / "handoff.csv", device=cpu_device(len(os.sched_getaffinity(0))), command=command)
    page_bytes = options.page_kib * 1024
    moves, raws = measure(options.pages, page_bytes, options.rounds)
    total_gb = options.pages * page_bytes / 1e9
    shape = f"{options.pages} x {options.page_kib} KiB loopback, median of {options.rounds}"
    for way, took in (("tcp hand-off", moves), ("raw socket", raws)):
        rows.add(shape, way, total_gb / statistics.median(each.wall_s for each in took), "GB/s")
        rows.add(shape, f"{way}, both ends", statistics.median(each.cpu_s for each in took) / total_gb, "s CPU/GB")
    pairs = list(zip(moves, raws, strict=True))
    walls = statistics.median(raw.wall_s / move.wall_s for move, raw in pairs)
    rows.add(shape, "share of raw socket", 100 * walls, "%")
    cpus = statistics.median(raw.cpu_s / move.cpu_s for move, raw in pairs)
    rows.add(shape, "share of raw socket, CPU time", 100 * cpus, "%")


if __name__ == "__main__":
    main()
