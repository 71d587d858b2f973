from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cluster_plan import SHM_SHARE_MAX, plan_fronts, plan_workers, served_name
from launcher.host_facts import Gpu, HostFacts
from segue.config import (
    ClusterConfig,
    DirectoryConfig,
    EngineConfig,
    FrontConfig,
    ModelConfig,
    SchedulerConfig,
    TenantLimits,
    WorkerConfig,
)
from segue.errors import ConfigError
from segue.manifest import Role

GIB = 1 << 30
HOST = HostFacts(cores=8, shm_free_bytes=16 * GIB)
GPU_HOST = HostFacts(cores=8, shm_free_bytes=GIB, gpus=(Gpu(0, "a", 100 * GIB), Gpu(1, "b", 100 * GIB)))


def cluster(**settings: object) -> ClusterConfig:
    return msgspec.structs.replace(ClusterConfig(model=ModelConfig(path="/models/Toy-1B")), **settings)


def workers(config: ClusterConfig, host: HostFacts = HOST) -> list[WorkerConfig]:
    return plan_workers(config, host, cluster="segue-00", conductors=["127.0.0.1:1"], runtime_dir="/run/segue-00")


def test_names_and_roles() -> None:
    planned = workers(cluster(prefill=2, decode=1, aggregated=1))
    assert [(worker.name, worker.role) for worker in planned] == [
        ("prefill-0", Role.PREFILL),
        ("prefill-1", Role.PREFILL),
        ("decode-0", Role.DECODE),
        ("aggregated-0", Role.AGGREGATED),
    ]


def test_uuids_differ_between_instances_and_between_clusters_but_not_between_calls() -> None:
    first = [worker.uuid for worker in workers(cluster())]
    other = plan_workers(cluster(), HOST, cluster="segue-01", conductors=["c"], runtime_dir="r")
    assert first == [worker.uuid for worker in workers(cluster())]
    assert len({*first, *(worker.uuid for worker in other)}) == 4


def test_every_worker_dials_the_conductor_and_keeps_to_the_clusters_names() -> None:
    for worker in workers(cluster()):
        assert worker.conductors == ("127.0.0.1:1",)
        assert (worker.shm_prefix, worker.runtime_dir) == ("segue-00", "/run/segue-00")


@pytest.mark.parametrize(("path", "name"), [("/m/Toy-1B", "Toy-1B"), ("/m/toy.Q4_1.gguf", "toy.Q4_1"), ("toy/", "toy")])
def test_model_is_served_under_its_own_name(path: str, name: str) -> None:
    assert served_name(ModelConfig(path=path)) == name


def test_given_name_wins_everywhere() -> None:
    config = cluster(model=ModelConfig(path="/m/x", name="nice"))
    (front,) = plan_fronts(config)
    assert front.model_names == ("nice",)
    assert {worker.model.name for worker in workers(config)} == {"nice"}


def test_front_keeps_what_was_asked() -> None:
    asked = FrontConfig(host="0.0.0.0", grpc_port=1, http_port=2)
    assert plan_fronts(cluster(front=asked)) == [msgspec.structs.replace(asked, model_names=("Toy-1B",))]


@given(cores=st.integers(1, 64), prefill=st.integers(1, 8), decode=st.integers(1, 8))
def test_instances_never_want_more_threads_than_cores_unless_there_are_fewer_cores(
    cores: int, prefill: int, decode: int
) -> None:
    host = HostFacts(cores=cores, shm_free_bytes=64 * GIB)
    threads = [worker.engine.threads for worker in workers(cluster(prefill=prefill, decode=decode), host)]
    assert min(threads) >= 1
    assert sum(threads) <= max(cores, len(threads))


def test_asked_for_threads_are_kept() -> None:
    assert {worker.engine.threads for worker in workers(cluster(engine=EngineConfig(threads=3)))} == {3}


@given(shm=st.integers(GIB, 64 * GIB), decode=st.integers(1, 5))
def test_decode_pools_together_fit_shared_memory(shm: int, decode: int) -> None:
    planned = workers(cluster(prefill=1, decode=decode), HostFacts(cores=2, shm_free_bytes=shm))
    shared = [worker for worker in planned if worker.role is Role.DECODE]
    assert len(shared) == decode
    assert sum(worker.engine.kv_memory_bytes for worker in shared) <= shm * SHM_SHARE_MAX


def test_aggregated_instances_need_no_shared_memory() -> None:
    (alone,) = workers(cluster(prefill=0, decode=0, aggregated=1), HostFacts(cores=2, shm_free_bytes=0))
    assert alone.engine.kv_memory_bytes > 0


def test_small_shared_memory_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"/dev/shm.*--shm-size"):
        workers(cluster(), HostFacts(cores=2, shm_free_bytes=64 << 20))


def test_more_page_memory_than_there_is_gets_refused() -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        workers(cluster(engine=EngineConfig(kv_memory_bytes=20 * GIB)))


def test_counted_pages_leave_sizing_to_the_engine() -> None:
    planned = workers(cluster(engine=EngineConfig(pages=64)), HostFacts(cores=2, shm_free_bytes=0))
    assert {(worker.engine.pages, worker.engine.kv_memory_bytes) for worker in planned} == {(64, 0)}


def aggregated(count: int, device: str = "auto") -> ClusterConfig:
    return cluster(prefill=0, decode=0, aggregated=count, engine=EngineConfig(device=device))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_aggregated_instances_are_dealt_over_gpus(device: str) -> None:
    planned = workers(aggregated(3, device), GPU_HOST)
    assert [worker.engine.device for worker in planned] == ["cuda:0", "cuda:1", "cuda:0"]


def test_instances_that_share_a_gpu_share_its_memory() -> None:
    first, alone, second = workers(aggregated(3), GPU_HOST)
    assert first.engine.gpu_memory_utilization == second.engine.gpu_memory_utilization == 0.45
    assert alone.engine.gpu_memory_utilization == 0.9


def test_instances_on_a_named_gpu_share_its_memory() -> None:
    planned = workers(aggregated(3, "cuda:1"), GPU_HOST)
    assert [round(worker.engine.gpu_memory_utilization, 9) for worker in planned] == [0.3, 0.3, 0.3]


def test_a_named_gpu_is_kept() -> None:
    assert [worker.engine.device for worker in workers(aggregated(1, "cuda:1"), GPU_HOST)] == ["cuda:1"]


def test_pairs_stay_on_the_cpu_by_themselves_and_share_a_gpu_when_asked() -> None:
    host = msgspec.structs.replace(GPU_HOST, shm_free_bytes=16 * GIB)
    assert {worker.engine.device for worker in workers(cluster(), host)} == {"cpu"}
    on_one = msgspec.structs.replace(host, gpus=host.gpus[:1])
    pair = workers(cluster(engine=EngineConfig(device="cuda")), on_one)
    assert [(worker.engine.device, worker.engine.gpu_memory_utilization) for worker in pair] == [("cuda:0", 0.45)] * 2


def test_pairs_on_a_gpu_go_by_cuda_ipc_alone() -> None:
    config = cluster(engine=EngineConfig(device="cuda"), scheduler=SchedulerConfig(kv_connector="tcp"))
    with pytest.raises(ConfigError, match="cuda_ipc"):
        workers(config, GPU_HOST)


def test_cpu_can_be_forced_on_a_gpu_host() -> None:
    assert {worker.engine.device for worker in workers(aggregated(1, "cpu"), GPU_HOST)} == {"cpu"}


@pytest.mark.parametrize(
    ("counts", "option"),
    [
        ({"prefill": 0, "decode": 0}, "no instances"),
        ({"prefill": 1, "decode": 0}, "--decode"),
        ({"prefill": 0, "decode": 1}, "--prefill"),
        ({"prefill": -1}, "--prefill"),
        ({"prefill": 1024}, "--prefill 1024: 1025 instances; a cluster has at most 1024"),
    ],
)
def test_sets_of_instances_that_cannot_serve_are_refused(counts: dict[str, int], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        plan_fronts(cluster(**counts))


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"engine": EngineConfig(device="gpu")}, "--device 'gpu'"),
        ({"engine": EngineConfig(device="cuda:x")}, "--device"),
        ({"engine": EngineConfig(threads=-1)}, "--threads must be 0 or more, got -1"),
        ({"engine": EngineConfig(block_size=-1)}, "--block-size"),
        ({"model": ModelConfig(path="toy", max_model_len=-5)}, "--max-model-len"),
        ({"scheduler": SchedulerConfig(max_num_seqs=0)}, "--max-num-seqs must be 1 or more"),
        ({"scheduler": SchedulerConfig(max_num_batched_tokens=0)}, "--max-num-batched-tokens"),
        ({"scheduler": SchedulerConfig(steps_max=0)}, "--steps-max"),
        ({"front": FrontConfig(log_level="loud")}, "--log-level 'loud'"),
    ],
)
def test_values_that_would_fail_late_or_be_ignored_are_refused_before_anything_starts(
    settings: dict[str, object], option: str
) -> None:
    with pytest.raises(ConfigError, match=option):
        plan_fronts(cluster(**settings))


REDIS = FrontConfig(directory=DirectoryConfig(redis_url="redis://127.0.0.1:1"), record="/tmp/x.rec")


def test_each_conductor_has_ports_and_a_recording_of_its_own() -> None:
    fronts = plan_fronts(cluster(conductors=3, front=REDIS), "segue-00")
    assert [(front.grpc_port, front.http_port) for front in fronts] == [(50051, 8000), (50052, 8001), (50053, 8002)]
    assert [front.record for front in fronts] == ["/tmp/x.rec", "/tmp/x.rec.1", "/tmp/x.rec.2"]
    assert len({front.directory for front in fronts}) == 1


def test_any_free_port_stays_any_free_port() -> None:
    asked = msgspec.structs.replace(REDIS, grpc_port=0, http_port=0)
    fronts = plan_fronts(cluster(conductors=2, front=asked), "segue-00")
    assert [(front.grpc_port, front.http_port) for front in fronts] == [(0, 0), (0, 0)]


def test_conductors_and_workers_meet_in_the_directory_under_the_name_of_their_run() -> None:
    config = cluster(conductors=2, front=REDIS)
    (front, _) = plan_fronts(config, "segue-00")
    (worker, *_) = workers(config)
    assert front.directory == worker.directory
    assert front.directory.cluster == "segue-00"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"conductors": 2}, "--conductors 2 needs --redis-url"),
        ({"conductors": 0}, "--conductors must be in 1 .. 64, got 0"),
        ({"front": FrontConfig(tenants=TenantLimits(requests_max=-1))}, "--tenant-requests must be 0 or more"),
        ({"front": FrontConfig(tenants=TenantLimits(tokens_per_minute=-1))}, "--tenant-tokens must be 0 or more"),
    ],
)
def test_conductors_that_could_not_work_together_are_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan_fronts(cluster(**settings))
