"""Frozen configuration, nested by owner. Defaults < file < command line; "auto" is resolved once by a pure function.

The command line builds a ClusterConfig; the launcher derives one WorkerConfig for each instance and one FrontConfig for
the Conductor + gateway process, and hands each over as JSON. Unknown keys are an error.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from segue.errors import ConfigError
from segue.manifest import Role


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every configuration record."""


C = TypeVar("C", bound=Config)


class ModelConfig(Config, frozen=True, kw_only=True):
    path: str
    """A directory with config.json + safetensors, or a GGUF file."""
    name: str = ""
    """Served model name; empty: derived from the path."""
    dtype: str = "auto"
    """float32, bfloat16, float16; auto: float32 on CPU, the checkpoint's own on GPU."""
    max_model_len: int = 0
    """0: the model's own maximum."""
    quantization: str = ""
    """fp8: linear layers with fp8 weights and activations (GPU); empty: as stored."""


class EngineConfig(Config, frozen=True, kw_only=True):
    device: str = "auto"
    """cpu, cuda, cuda:N; auto: cuda when there is one."""
    threads: int = 0
    """CPU threads of this instance's math; 0: left to torch."""
    attention_prefill: str = "auto"
    attention_decode: str = "auto"
    """Backend names (torch, triton, cudnn); auto: by device and capability."""
    block_size: int = 0
    """Tokens per KV page; 0: 16 on CPU, 64 on GPU."""
    pages: int = 0
    """KV pages; 0: sized by `kv_memory_bytes`, or on a GPU by what the rest of the engine leaves."""
    kv_memory_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's whole memory that one engine may take, pages included."""
    kv_dtype: str = "auto"
    """As `dtype`, or fp8 (GPU); auto: the model's."""
    cuda_graphs: bool = True
    batch_invariant: bool = False
    """A request's tokens and log-probabilities have the same bits whatever else is computed with it."""

    @property
    def uses_graphs(self) -> bool:
        """Graphs choose kernels by the size of a step, which a batch-invariant engine must not."""
        return self.cuda_graphs and not self.batch_invariant


class SchedulerConfig(Config, frozen=True, kw_only=True):
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    """Token budget of one step: decodes first, the rest for prefill chunks."""
    tokens_saturating: int = 2560
    """Tokens of a step, decodes included, from which on more would not run faster, only later: bounds steps that others
    wait for. 0: off."""
    prefix_caching: bool = True
    pipeline_depth: int = 0
    steps_max: int = 1
    handoff_lease_ms: int = 10_000
    drain_s: float = 30.0
    """An instance that is to leave lets what it runs end for so long; the rest is planned again elsewhere."""
    kv_connector: str = "auto"
    """shared_memory, tcp, cuda_ipc; auto: shared memory where both ends see it, else TCP; on a GPU CUDA IPC."""


class DirectoryConfig(Config, frozen=True, kw_only=True):
    """Where Conductors and workers find each other, and what Conductors share."""

    redis_url: str = ""
    """redis://, rediss:// or unix://; empty: embedded, for one Conductor whose address the workers are given."""
    cluster: str = "segue"
    """Keeps clusters apart that share a Redis."""
    lease_ms: int = 5_000
    """A Conductor that has not renewed its membership for so long is gone."""


class TenantLimits(Config, frozen=True, kw_only=True):
    """What each tenant may use, over all Conductors of the directory; 0: no limit."""

    requests_max: int = 0
    """Live requests; each choice of a call is one."""
    tokens_per_minute: int = 0
    """Prompt and generated tokens."""


class AdmissionConfig(Config, frozen=True, kw_only=True):
    """What the Conductor admits, and in which order. Without objectives everything that fits."""

    slo_ttft_s: float = 0.0
    """Objective of TTFT; 0: none."""
    slo_ttft_factor: float = 3.0
    """A prompt may take so many times what an idle instance takes for it, where that is more than `slo_ttft_s`."""
    slo_tpot_s: float = 0.0
    """Objective of TPOT; 0: none."""
    cost_model: str = ""
    """JSON file of `segue.cost_model.CostModel`; empty: costs are learned from what is served."""
    tenant_weights: dict[str, float] = {}
    """Share of GPU time that a tenant gets while others wait; 1 where not named."""
    tenant_queue_max: int = 0
    """Requests of one tenant that may wait; 0: as many as the queue holds while nobody else wants it."""


class WorkerConfig(Config, frozen=True, kw_only=True):
    """Everything one prefill, decode or aggregated instance needs to run."""

    uuid: str
    name: str
    role: Role
    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    conductors: tuple[str, ...] = ()
    """gRPC addresses (host:port) of the Conductors to dial, beside those that the directory names."""
    directory: DirectoryConfig = DirectoryConfig()
    bind_host: str = "127.0.0.1"
    runtime_dir: str = ""
    """Private directory for sockets of this cluster."""
    shm_prefix: str = "segue"
    """Names of shared-memory segments start with this; the launcher removes leftovers by it."""


class FrontConfig(Config, frozen=True, kw_only=True):
    """The Conductor + gateway process."""

    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int = 8000
    model_names: tuple[str, ...] = ()
    queue_max: int = 0
    """0: limits.QUEUED_REQUESTS_MAX."""
    strict_fields: bool = False
    log_level: str = "info"
    advertise_host: str = ""
    """Where workers and clients reach this process; empty: `host`, or the machine's own if that is a wildcard."""
    directory: DirectoryConfig = DirectoryConfig()
    tenants: TenantLimits = TenantLimits()
    admission: AdmissionConfig = AdmissionConfig()
    record: str = ""
    """File to which the Conductor appends what it was told and decided, for replay; empty: none."""


class ClusterConfig(Config, frozen=True, kw_only=True):
    """What `segue up` was asked for."""

    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    front: FrontConfig = FrontConfig()
    conductors: int = 1
    """Conductor + gateway processes; more than one need a directory that they share."""
    prefill: int = 1
    decode: int = 1
    aggregated: int = 0
    local_processes: bool = False


def decode_config(raw: bytes | dict[str, Any], kind: type[C], source: str) -> C:
    """Read `kind` from JSON bytes or a parsed mapping; raise ConfigError that names `source` and the key."""
    try:
        if isinstance(raw, bytes):
            return msgspec.json.decode(raw, type=kind)
        return msgspec.convert(raw, kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{source}: {error}") from error
