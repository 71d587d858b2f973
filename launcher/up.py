"""`segue up`: run a cluster in the foreground until a signal ends it, or a death that it cannot go on after."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from launcher.cluster import Cluster, Endpoints, StartInterrupted, describe
from launcher.cluster_plan import instance_roles, plan_fronts, runs_on_gpu, threads_per_instance
from launcher.doctor import Level, check_port
from launcher.host_facts import HostFacts, read_host_facts
from launcher.progress import Progress
from launcher.runtime_dir import sweep_stale_clusters
from segue.config import ClusterConfig, FrontConfig
from segue.errors import ConfigError, SegueError

WATCH_SECONDS = 0.1
"""What a dead instance waits at most before it is started again."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_up(config: ClusterConfig, progress: Progress, logs: Path | None) -> int:
    """Exit status: 0 after a stop that was asked for, 1 after a failure."""
    stop = threading.Event()
    _on_stop_signal(stop)
    for front in plan_fronts(config):
        check_ports(front)
    host = read_host_facts()
    cluster = Cluster(config, host, progress=progress, interrupted=stop, logs=logs)
    try:
        return _serve(cluster, config, host, progress, stop)
    except StartInterrupted:
        return 0
    except SegueError as error:
        progress.say(f"segue: {error}")
        return 1
    finally:
        _on_stop_signal(stop)
        with progress.working("stopping"):
            cluster.stop()
        progress.done("stopped; nothing is left running")


def sweep(progress: Progress) -> None:
    """Before anything is checked, so that a start that is refused cleans up too."""
    for stale in sweep_stale_clusters():
        progress.say(f"removed what a killed launcher left: {stale}")


def _serve(cluster: Cluster, config: ClusterConfig, host: HostFacts, progress: Progress, stop: threading.Event) -> int:
    endpoints = cluster.start()
    _on_stop_signal(stop)  # Ray replaces the handler of SIGTERM when it starts
    for line in banner(endpoints, config, host):
        progress.say(line)
    while not stop.wait(WATCH_SECONDS):
        if (death := cluster.tend()) is not None:
            progress.say(f"segue: {describe(death)}")
            return 1
    return 0


def check_ports(front: FrontConfig) -> None:
    """Say it at once, and how to go on, when another program holds a port."""
    host = "" if front.host == "0.0.0.0" else front.host
    for option, port in {"--grpc-port": front.grpc_port, "--http-port": front.http_port}.items():
        finding = check_port(option, port, host)
        if finding.level == Level.FAIL:
            raise ConfigError(f"{option}: {port} on {front.host}: {finding.detail}; {finding.remedy}")


def _on_stop_signal(stop: threading.Event) -> None:
    def handle(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in STOP_SIGNALS:
        signal.signal(number, handle)


def banner(endpoints: Endpoints, config: ClusterConfig, host: HostFacts) -> list[str]:
    """What a user needs now: where the cluster listens, and two lines to paste."""
    roles = [role.value for role in instance_roles(config)]
    instances = " + ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
    where = "GPU" if runs_on_gpu(config, host) else f"CPU, {threads_per_instance(config, host)} thread(s) each"
    idle_gpu = bool(host.gpus) and config.engine.device == "auto" and not runs_on_gpu(config, host)
    body = {"model": endpoints.model, "stream": True, "messages": [{"role": "user", "content": "Hello!"}]}
    return [
        "",
        f"Segue serves {endpoints.model}: {instances} ({where})",
        f"  gRPC  {endpoints.grpc}",
        f"  HTTP  http://{endpoints.http}/v1",
        *(f"  gRPC  {other.grpc}, HTTP  http://{other.http}/v1" for other in endpoints.others),
        "Try:",
        f"  {segue_command()} generate --address {endpoints.grpc} --max-tokens 64 {shlex.quote('Once upon a time')}",
        f"  curl -N http://{endpoints.http}/v1/chat/completions -H 'content-type: application/json' -d "
        + shlex.quote(json.dumps(body)),
        *(
            ["The GPU is not used: K/V is not handed over between GPUs yet; --aggregated N runs there."]
            if idle_gpu
            else []
        ),
        "Ctrl-C stops everything.",
    ]


def segue_command() -> str:
    """`segue` when the shell would find this one, else its path."""
    own = Path(sys.argv[0]).resolve()
    found = shutil.which("segue")
    return "segue" if found and Path(found).resolve() == own else shlex.quote(str(own))
