"""From what was asked for (ClusterConfig) and what the machine offers to one config for each process. Pure.

Rules: CPU instances share the cores evenly, because two thread pools on one core cost more than they give; K/V pages of
decode instances live in shared memory, so what all of them ask for must fit there before anything starts; GPU
instances are dealt over the GPUs in turn.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import PurePath

import msgspec

from launcher.host_facts import HostFacts
from launcher.option_values import check_named_values
from segue.config import ClusterConfig, DirectoryConfig, EngineConfig, FrontConfig, ModelConfig, WorkerConfig
from segue.errors import ConfigError
from segue.limits import CONDUCTORS_MAX, INSTANCES_MAX
from segue.manifest import Role

KV_MEMORY_BYTES_DEFAULT = 1 << 30
"""Per CPU instance: 23k tokens of a 135M model in fp32, and half of what small machines give /dev/shm."""

KV_MEMORY_BYTES_MIN = 64 << 20
"""Below this even a demo model holds less than one long prompt."""

SHM_SHARE_MAX = 0.8
"""Part of free shared memory that page pools may take; hand-off rings and other programs need the rest."""


DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
LOG_LEVELS = ("debug", "info", "warning", "error")

INSTANCE_NAMESPACE = uuid.UUID("7d3c0f1e-52a5-4f0b-9f5e-1f3f6f8c9a10")

ENTRY_MODULES = {
    Role.PREFILL: "prefill_worker.app",
    Role.DECODE: "decode_worker.app",
    Role.AGGREGATED: "decode_worker.app",
}


def served_name(model: ModelConfig) -> str:
    """The configured name, or the file's or folder's own."""
    if model.name:
        return model.name
    path = PurePath(model.path)
    return path.stem if path.suffix == ".gguf" else path.name


def check_cluster(config: ClusterConfig) -> None:
    """Raise ConfigError when the asked-for instances cannot serve a request together, or for a setting that no process
    would tell of as clearly."""
    counts = {"--prefill": config.prefill, "--decode": config.decode, "--aggregated": config.aggregated}
    _check_least(0, counts)
    if (instances := sum(counts.values())) > INSTANCES_MAX:
        most = max(counts, key=lambda option: counts[option])
        raise ConfigError(f"{most} {counts[most]}: {instances} instances; a cluster has at most {INSTANCES_MAX}")
    if config.prefill and not config.decode:
        raise ConfigError("--prefill needs at least one --decode to hand its requests to")
    if config.decode and not config.prefill:
        raise ConfigError("--decode needs at least one --prefill; use --aggregated for instances that do both")
    if not config.decode and not config.aggregated:
        raise ConfigError("no instances: ask for --prefill and --decode, or --aggregated")
    if not DEVICE.fullmatch(config.engine.device):
        raise ConfigError(f"--device {config.engine.device!r}: known: auto, cpu, cuda, cuda:N")
    engine, scheduler = config.engine, config.scheduler
    at_least_0 = {"--threads": engine.threads, "--block-size": engine.block_size, "--kv-pages": engine.pages}
    tenants = config.front.tenants
    at_least_0 |= {"--tenant-requests": tenants.requests_max, "--tenant-tokens": tenants.tokens_per_minute}
    at_least_0 |= {"--max-model-len": config.model.max_model_len, "--queue-max": config.front.queue_max}
    at_least_0["--tenant-queue-max"] = config.front.admission.tenant_queue_max
    at_least_1 = {
        "--max-num-seqs": scheduler.max_num_seqs,
        "--max-num-batched-tokens": scheduler.max_num_batched_tokens,
    }
    _check_least(0, at_least_0)
    _check_least(1, at_least_1 | {"--steps-max": scheduler.steps_max})
    check_named_values(config)
    _check_conductors(config)
    if config.front.log_level not in LOG_LEVELS:
        raise ConfigError(f"--log-level {config.front.log_level!r}: known: {', '.join(LOG_LEVELS)}")
    if config.decode and config.engine.device.startswith("cuda") and scheduler.kv_connector not in ("auto", "cuda_ipc"):
        raise ConfigError(f"--kv-connector {scheduler.kv_connector}: K/V of GPUs is handed over by cuda_ipc")


def _check_conductors(config: ClusterConfig) -> None:
    if not 1 <= config.conductors <= CONDUCTORS_MAX:
        raise ConfigError(f"--conductors must be in 1 .. {CONDUCTORS_MAX}, got {config.conductors}")
    if config.conductors > 1 and not config.front.directory.redis_url:
        raise ConfigError(f"--conductors {config.conductors} needs --redis-url: Conductors find each other in Redis")


def _check_least(least: int, values: Mapping[str, int]) -> None:
    for option, value in values.items():
        if value < least:
            raise ConfigError(f"{option} must be {least} or more, got {value}")


def instance_roles(config: ClusterConfig) -> list[Role]:
    return [Role.PREFILL] * config.prefill + [Role.DECODE] * config.decode + [Role.AGGREGATED] * config.aggregated


def threads_per_instance(config: ClusterConfig, host: HostFacts) -> int:
    return config.engine.threads or max(1, host.cores // len(instance_roles(config)))


def runs_on_gpu(config: ClusterConfig, host: HostFacts) -> bool:
    """`auto` takes a GPU only for aggregated instances: between processes K/V is handed over within one GPU so far."""
    if config.engine.device == "auto":
        return bool(host.gpus) and not config.decode
    return config.engine.device.startswith("cuda")


def plan_fronts(config: ClusterConfig, cluster: str = "segue") -> list[FrontConfig]:
    """One config for each Conductor + gateway process. The first has the ports asked for, the others those that follow;
    `cluster` names this run in a directory that others use as well."""
    check_cluster(config)
    front = msgspec.structs.replace(
        config.front, model_names=(served_name(config.model),), directory=_directory(config, cluster)
    )
    return [front] + [_another_front(front, number) for number in range(1, config.conductors)]


def _another_front(front: FrontConfig, number: int) -> FrontConfig:
    return msgspec.structs.replace(
        front,
        grpc_port=front.grpc_port and front.grpc_port + number,
        http_port=front.http_port and front.http_port + number,
        record=front.record and f"{front.record}.{number}",
    )


def _directory(config: ClusterConfig, cluster: str) -> DirectoryConfig:
    directory = config.front.directory
    return msgspec.structs.replace(directory, cluster=cluster) if directory.redis_url else directory


def plan_workers(
    config: ClusterConfig, host: HostFacts, *, cluster: str, conductors: Sequence[str], runtime_dir: str
) -> list[WorkerConfig]:
    """One config for each instance. `cluster` names this run: shared memory and instance uuids derive from it."""
    check_cluster(config)
    roles = instance_roles(config)
    model = msgspec.structs.replace(config.model, name=served_name(config.model))
    return [
        WorkerConfig(
            uuid=instance_uuid(cluster, name),
            name=name,
            role=role,
            model=model,
            engine=_plan_engine(config, host, slot, roles),
            scheduler=config.scheduler,
            conductors=tuple(conductors),
            directory=_directory(config, cluster),
            runtime_dir=runtime_dir,
            shm_prefix=cluster,
        )
        for slot, (name, role) in enumerate(zip(_names(roles), roles, strict=True))
    ]


def instance_uuid(cluster: str, name: str) -> str:
    return uuid.uuid5(INSTANCE_NAMESPACE, f"{cluster}/{name}").hex


def plan_another(template: WorkerConfig, name: str) -> WorkerConfig:
    """The config of one more instance of the template's role, like it in everything but its name."""
    return msgspec.structs.replace(template, uuid=instance_uuid(template.shm_prefix, name), name=name)


def shared_memory_refusal(template: WorkerConfig, count: int, shm_free_bytes: int) -> str:
    """Why `count` more instances like `template` would not find room for their pages, or ""."""
    scheduler, engine = template.scheduler, template.engine
    if template.role is not Role.DECODE or scheduler.kv_connector == "tcp" or engine.pages:
        return ""
    needed, free = count * engine.kv_memory_bytes, int(shm_free_bytes * SHM_SHARE_MAX)
    if needed <= free:
        return ""
    return (
        f"{count} more decode instances take {engine.kv_memory_bytes >> 20} MiB each of /dev/shm and {free >> 20} MiB "
        "may be taken; enlarge it, or start with a smaller --kv-memory"
    )


def _names(roles: list[Role]) -> list[str]:
    return [f"{role.value}-{roles[:slot].count(role)}" for slot, role in enumerate(roles)]


def _plan_engine(config: ClusterConfig, host: HostFacts, slot: int, roles: list[Role]) -> EngineConfig:
    engine = msgspec.structs.replace(config.engine, threads=threads_per_instance(config, host))
    if runs_on_gpu(config, host):
        return _on_gpu(engine, host, slot, len(roles))
    kv_memory_bytes = _cpu_kv_bytes(engine, host, shared=roles[slot] is Role.DECODE, pools_shared=config.decode)
    return msgspec.structs.replace(engine, device="cpu", kv_memory_bytes=kv_memory_bytes)


def _on_gpu(engine: EngineConfig, host: HostFacts, slot: int, instances: int) -> EngineConfig:
    if engine.device not in ("auto", "cuda") or not host.gpus:
        share = engine.gpu_memory_utilization / instances
        return msgspec.structs.replace(engine, gpu_memory_utilization=share)
    gpu = host.gpus[slot % len(host.gpus)]
    sharing = len(range(slot % len(host.gpus), instances, len(host.gpus)))
    share = engine.gpu_memory_utilization / sharing
    return msgspec.structs.replace(engine, device=f"cuda:{gpu.index}", gpu_memory_utilization=share)


def _cpu_kv_bytes(engine: EngineConfig, host: HostFacts, *, shared: bool, pools_shared: int) -> int:
    """Only decode instances' pools are shared memory: they are what prefill instances write into."""
    if engine.pages or not shared:
        return engine.kv_memory_bytes or (0 if engine.pages else KV_MEMORY_BYTES_DEFAULT)
    share = int(host.shm_free_bytes * SHM_SHARE_MAX) // pools_shared
    wanted = engine.kv_memory_bytes or min(KV_MEMORY_BYTES_DEFAULT, share)
    if wanted > share or share < KV_MEMORY_BYTES_MIN:
        raise ConfigError(
            f"--kv-memory: {pools_shared} decode instances may take {share >> 20} MiB each of /dev/shm and need "
            f"{max(wanted, KV_MEMORY_BYTES_MIN) >> 20} MiB each; enlarge it (docker run --shm-size=4g, or "
            "mount -o remount,size=4G /dev/shm), ask for less, or use --aggregated"
        )
    return wanted
