"""Latency and throughput through a whole cluster of the demo model: gRPC clients, 1 prefill + 1 decode instance.

For each concurrency, that many clients send streaming requests one after another, each with a prompt of its own (no
prefix hits), greedy, a fixed number of tokens. TTFT is the time from sending to the first token as the client sees it,
TPOT the mean gap between tokens of one request after the first. Back of the envelope, 2 AVX2 cores, 1 thread each for P
and D: the 135M model's weights are 540 MB in fp32, so a decode step of one sequence takes at least 540 MB / 10 GB/s =
54 ms, and a prompt of 128 tokens at least 2 * 135M * 128 FLOP / 50 GFLOP/s = 0.7 s.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import quantiles

import grpc
from result_rows import RESULTS, ResultFile, cpu_device
from segue_proto.v1 import inference_pb2, inference_pb2_grpc

from launcher.demo_model import demo_model_path

SEGUE = Path(sys.executable).parent / "segue"
READY_LINE = "Ctrl-C stops everything."


@dataclass(frozen=True)
class Sample:
    ttft_ms: float
    tpot_ms: float
    tokens: int


def request_of(number: int, tokens_prompt: int, tokens_out: int) -> inference_pb2.GenerateRequest:
    """Token ids that differ from request to request already in the first block."""
    request = inference_pb2.GenerateRequest()
    request.tokens.ids.extend(1000 + (number * 7919 + place * 31) % 40000 for place in range(tokens_prompt))
    request.sampling.temperature = 0.0
    request.sampling.max_tokens = tokens_out
    request.sampling.ignore_eos = True
    return request


def measure(stub: inference_pb2_grpc.InferenceStub, request: inference_pb2.GenerateRequest) -> Sample:
    sent = time.perf_counter()
    first = last = 0.0
    tokens = 0
    for response in stub.Generate(request, timeout=600):
        if response.WhichOneof("event") == "delta" and response.delta.token_ids:
            last = time.perf_counter()
            first = first or last
            tokens += len(response.delta.token_ids)
    return Sample((first - sent) * 1e3, (last - first) * 1e3 / max(1, tokens - 1), tokens)


def run_clients(
    address: str, requests: list[inference_pb2.GenerateRequest], concurrency: int
) -> tuple[list[Sample], float]:
    """Samples of all requests, and the seconds that they took together."""
    waiting: SimpleQueue[inference_pb2.GenerateRequest] = SimpleQueue()
    for request in requests:
        waiting.put(request)
    samples: list[Sample] = []

    def client() -> None:
        with grpc.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            while True:
                try:
                    request = waiting.get_nowait()
                except Empty:
                    return
                samples.append(measure(stub, request))

    threads = [threading.Thread(target=client) for _ in range(concurrency)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(samples) == len(requests), "a request failed"
    return samples, time.perf_counter() - started


def report(rows: ResultFile, shape: str, samples: list[Sample], seconds: float) -> None:
    for metric in ("ttft_ms", "tpot_ms"):
        cuts = quantiles([getattr(sample, metric) for sample in samples], n=100, method="inclusive")
        name = metric.removesuffix("_ms")
        rows.add(shape, f"{name}_p50", cuts[49], "ms")
        rows.add(shape, f"{name}_p99", cuts[98], "ms")
    rows.add(shape, "throughput", sum(sample.tokens for sample in samples) / seconds, "tok/s")


def start_cluster(options: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A cluster on free ports, and its gRPC address."""
    command = [str(SEGUE), "up", "--model", str(demo_model_path()), "--grpc-port", "0", "--http-port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    address = ""
    for line in process.stdout:
        if match := re.match(r"\s+gRPC\s+(\S+)", line):
            address = match[1]
        if READY_LINE in line:
            return process, address
    raise SystemExit("the cluster did not start; run `segue up` to see why")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--requests-per-client", type=int, default=3)
    parser.add_argument("--tokens-prompt", type=int, default=128)
    parser.add_argument("--tokens-out", type=int, default=32)
    parser.add_argument("--aggregated", type=int, default=0, help="measure N aggregated instances instead of 1P + 1D")
    parser.add_argument("--out", type=Path, default=RESULTS / "cluster_cpu.csv")
    args = parser.parse_args()
    kind = f"{args.aggregated} aggregated" if args.aggregated else "1P+1D"
    command = f"cluster_latency.py {kind}"
    rows = ResultFile(args.out, device=cpu_device(len(os.sched_getaffinity(0))), command=command)
    cluster, address = start_cluster(["--aggregated", str(args.aggregated)] if args.aggregated else [])
    try:
        run_clients(address, [request_of(0, args.tokens_prompt, 4)], 1)
        number = 1
        for concurrency in args.concurrency:
            count = concurrency * args.requests_per_client
            requests = [request_of(number + i, args.tokens_prompt, args.tokens_out) for i in range(count)]
            number += count
            shape = f"prompt {args.tokens_prompt}, out {args.tokens_out}, concurrency {concurrency}"
            report(rows, shape, *run_clients(address, requests, concurrency))
    finally:
        cluster.terminate()
        cluster.wait(timeout=60)


if __name__ == "__main__":
    main()
