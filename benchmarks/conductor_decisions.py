"""What one placement costs the Conductor core: decisions per second and their 50th and 99th percentile.

Half of the instances prefill, half decode. Together they hold `--blocks` KV blocks; every request has a prompt of
`--tokens` tokens whose first half some instances hold (chosen at random), so that each decision walks a long chain,
ranks all instances, books, and is then driven to its end by outcomes. Floor, for comparison: one dict look-up per
block of the chain is about 0.1 us, 2048 blocks at a 32k prompt and block size 16 make 0.2 ms. Times are CPU time of
the one thread that decides, so that a busy machine does not show.

    python benchmarks/conductor_decisions.py --instances 16 256
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from result_rows import RESULTS, ResultFile, cpu_device

from conductor.core.decisions import Route
from conductor.core.events import InstanceJoined, KvPublished, OutcomeReported, RequestArrived, RequestFinished
from conductor.core.machine import ConductorCore
from segue.ids import InstanceRef
from segue.kv_events import BlocksStored, KvEventBatch
from segue.kv_layout import KvLayout
from segue.manifest import InstanceManifest, Role
from segue.worker_messages import Outcome, OutcomeKind


@dataclass(frozen=True)
class Result:
    decisions_s: float
    p50_us: float
    p99_us: float
    kv_events_blocks_s: float
    rss_mib: float


def manifest(number: int, instances: int, block_size: int) -> InstanceManifest:
    role = Role.PREFILL if number < instances // 2 else Role.DECODE
    name = f"{role}-{number}"
    return InstanceManifest(
        ref=InstanceRef(name, 1),
        name=name,
        role=role,
        host="host",
        pid=number,
        model="bench",
        card_digest="card",
        kv_root="00" * 32,
        layout=KvLayout(layers=30, kv_heads=3, head_dim=64, block_size=block_size, dtype="bfloat16"),
        pages_total=1 << 20,
        max_model_len=1 << 20,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        control_address="",
        events_address="",
    )


def chains(rng: random.Random, blocks_total: int, blocks_each: int) -> list[list[bytes]]:
    return [[rng.randbytes(16) for _ in range(blocks_each)] for _ in range(max(1, blocks_total // blocks_each))]


def fill(core: ConductorCore, rng: random.Random, members: list[InstanceManifest], held: list[list[bytes]]) -> float:
    """Publish each chain from two instances; returns blocks applied per second."""
    sequences = dict.fromkeys((member.ref for member in members), 0)
    applied = 0
    started = time.thread_time()
    for chain in held:
        for member in rng.sample(members, 2):
            sequences[member.ref] += 1
            batch = KvEventBatch(member.ref, sequences[member.ref], [BlocksStored(b"", chain)])
            core.step(0, [KvPublished(batch=batch)])
            applied += len(chain)
    return applied / (time.thread_time() - started)


def arrivals(
    rng: random.Random, held: list[list[bytes]], tokens: int, block_size: int, count: int
) -> Iterator[RequestArrived]:
    blocks = tokens // block_size
    for number in range(count):
        shared = rng.choice(held)[: blocks // 2]
        own = [rng.randbytes(16) for _ in range(blocks - len(shared))]
        yield RequestArrived(
            request_id=f"r{number}",
            attempt=1,
            model="bench",
            tokens_prompt=tokens,
            tokens_known=tokens,
            tokens_max=tokens + 256,
            hash_root=b"",
            block_hashes=shared + own,
        )


def measure(instances: int, blocks: int, tokens: int, requests: int, live: int, block_size: int = 16) -> Result:
    """`live` requests are in flight at any time; only the step that places is timed."""
    rng = random.Random(7)
    core = ConductorCore()
    members = [manifest(number, instances, block_size) for number in range(instances)]
    for member in members:
        core.step(0, [InstanceJoined(manifest=member)])
    held = chains(rng, blocks, max(1, tokens // block_size // 2))
    blocks_s = fill(core, rng, members, held)
    times_us: list[float] = []
    routes: list[Route] = []
    for now_us, request in enumerate(arrivals(rng, held, tokens, block_size, requests)):
        started = time.thread_time()
        decisions = core.step(now_us * 1000, [request])
        times_us.append((time.thread_time() - started) * 1e6)
        routes += [decision for decision in decisions if isinstance(decision, Route)]
        if len(routes) > live:
            end(core, now_us * 1000, routes.pop(0))
    if core.requests_queued:
        raise SystemExit("the cluster is too small for this load: requests were queued")
    times_us.sort()
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Result(
        decisions_s=len(times_us) / sum(times_us) * 1e6,
        p50_us=times_us[len(times_us) // 2],
        p99_us=times_us[int(len(times_us) * 0.99)],
        kv_events_blocks_s=blocks_s,
        rss_mib=rss_mib,
    )


def end(core: ConductorCore, now_us: int, route: Route) -> None:
    def outcome(ref: InstanceRef, kind: OutcomeKind) -> OutcomeReported:
        report = Outcome(request_id=route.key.request_id, attempt=1, kind=kind, tokens_generated=100)
        return OutcomeReported(ref=ref, outcome=report)

    handed_over = [] if route.prefill is None else [outcome(route.decode, OutcomeKind.HANDOFF_COMPLETE)]
    core.step(
        now_us,
        [
            outcome(route.prefill or route.decode, OutcomeKind.PREFILL_DONE),
            *handed_over,
            outcome(route.decode, OutcomeKind.FINISHED),
            RequestFinished(request_id=route.key.request_id, reason="stop"),
        ],
    )


def write(file: ResultFile, shape: str, result: Result) -> None:
    file.add(shape, "placement", result.decisions_s, "decisions/s")
    file.add(shape, "placement p50", result.p50_us, "us")
    file.add(shape, "placement p99", result.p99_us, "us")
    file.add(shape, "KV events applied", result.kv_events_blocks_s, "blocks/s")
    file.add(shape, "process memory", result.rss_mib, "MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--live", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS / "conductor.csv")
    args = parser.parse_args()
    command = " ".join(["python", "benchmarks/conductor_decisions.py", *sys.argv[1:]])
    file = ResultFile(args.out, device=cpu_device(1), command=command)
    for instances in args.instances:
        result = measure(instances, args.blocks, args.tokens, args.requests, args.live, args.block_size)
        shape = (
            f"{instances} instances, {args.blocks} blocks of {args.block_size}, {args.tokens} tokens, {args.live} live"
        )
        write(file, shape, result)


if __name__ == "__main__":
    main()
