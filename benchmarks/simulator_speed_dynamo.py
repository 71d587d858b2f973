"""CPU seconds that Dynamo's offline replay takes for the trace that `simulator_speed.py` times, as one CSV row.

PYTHON benchmarks/simulator_speed_dynamo.py TRACE.jsonl [8 prefill] [8 decode]

PYTHON is an interpreter with `ai-dynamo` and `ai-dynamo-runtime` 1.6 (install with --no-deps, then typing_extensions):
their pins and ours do not go together. Its engine is Rust with a default timing model, its router the KV router; both
sides replay each request of the trace on as many instances, of as much K/V memory, so the times say what one core does
with the same workload, not that the simulated systems are the same.
"""

from __future__ import annotations

import sys
import time

from dynamo.replay.api import run_trace_replay

BLOCK_TOKENS = 512
BLOCKS = 672
"""LLaMA3-70B in FP8 on one H200, as in `simulator_speed.py`: 344,000 tokens."""


def main(trace: str, prefill: int = 8, decode: int = 8) -> None:
    limits = {
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks": BLOCKS,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8_192,
        "max_model_len": 1 << 18,
    }
    started_s, wall_s = time.process_time(), time.perf_counter()
    report = run_trace_replay(
        trace,
        prefill_engine_args={"engine": {**limits, "worker_type": "prefill"}},
        decode_engine_args={"engine": {**limits, "worker_type": "decode"}},
        num_prefill_workers=prefill,
        num_decode_workers=decode,
        router_mode="kv_router",
        trace_block_size=BLOCK_TOKENS,
    )
    cpu_s, wall_s = time.process_time() - started_s, time.perf_counter() - wall_s
    print("trace,prefill,decode,cpu_s,wall_s")
    print(f"{trace.rpartition('/')[2]},{prefill},{decode},{cpu_s:.2f},{wall_s:.2f}")
    print(str(report)[:600], file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))
