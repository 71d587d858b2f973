"""Values do what they say, and wrong ones are refused by name."""

from __future__ import annotations

import json
from typing import Any

import helm_python
import pytest
import yaml
from chart import CHART, Values, container, notes, one, pod_templates, pools, render

from segue.config import FrontConfig, WorkerConfig, decode_config
from segue.manifest import Role


def configuration(own: dict[str, Any]) -> bytes:
    return next(entry["value"] for entry in own["env"] if entry["name"] == "SEGUE_CONFIG").encode()


def test_each_pool_has_its_own_replicas() -> None:
    groups = pools(render({"prefill": {"replicas": 2}, "decode": {"replicas": 3, "minReplicas": 2, "maxReplicas": 8}}))
    counts = {name: (group["minReplicas"], group["replicas"], group["maxReplicas"]) for name, group in groups.items()}
    assert counts == {"prefill": (1, 2, 4), "decode": (2, 3, 8)}


def test_scaling_one_pool_changes_nothing_else() -> None:
    before, after = render(), render({"decode": {"replicas": 3}})
    pools(after)["decode"]["replicas"] = 1
    assert after == before


def test_an_instance_for_cpu_asks_for_no_gpu() -> None:
    instance = container(pools(render())["prefill"], "instance")
    assert set(instance["resources"]["limits"]) == {"memory"}
    assert json.loads(configuration(instance))["engine"]["device"] == "cpu"


def test_a_pool_on_gpus_leaves_the_other_on_cpus() -> None:
    groups = pools(render({"decode": {"gpus": 1, "gpuResource": "nvidia.com/mig-3g.71gb"}}))
    decode, prefill = container(groups["decode"], "instance"), container(groups["prefill"], "instance")
    assert decode["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/mig-3g.71gb": 1}
    assert json.loads(configuration(decode))["engine"]["device"] == "cuda"
    assert "nvidia.com/mig-3g.71gb" not in prefill["resources"]["limits"]


def test_gpus_belong_to_the_instance_not_to_ray() -> None:
    group = pools(render({"decode": {"gpus": 1}}))["decode"]
    assert "nvidia.com/gpu" not in container(group, "ray-worker")["resources"]["limits"]
    assert group["rayStartParams"]["num-gpus"] == "0"


def test_placement_is_per_pool() -> None:
    tolerations = [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]
    groups = pools(render({"decode": {"nodeSelector": {"gpu": "h200"}, "tolerations": tolerations}}))
    assert groups["decode"]["template"]["spec"]["nodeSelector"] == {"gpu": "h200"}
    assert groups["decode"]["template"]["spec"]["tolerations"] == tolerations
    assert not {"nodeSelector", "tolerations"} & set(groups["prefill"]["template"]["spec"])


def test_shared_memory_is_memory_of_the_given_size() -> None:
    group = pools(render({"prefill": {"shmSizeMi": 4096}}))["prefill"]
    volume = next(one for one in group["template"]["spec"]["volumes"] if one["name"] == "shm")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "4096Mi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container(group, "instance")["volumeMounts"]


@pytest.mark.parametrize("role", ["prefill", "decode", "aggregated"])
def test_the_instances_configuration_is_one_that_workers_take(role: str) -> None:
    objects = render({"aggregated": {"maxReplicas": 1}, "scheduler": {"maxNumSeqs": 7}})
    config = decode_config(configuration(container(pools(objects)[role], "instance")), WorkerConfig, role)
    assert (config.role, config.scheduler.max_num_seqs) == (Role(role), 7)
    assert config.engine.kv_memory_bytes == 1024 << 20


def test_the_fronts_configuration_is_one_that_the_conductor_takes() -> None:
    values = {"front": {"grpcPort": 6000, "queueMax": 9, "strictFields": True}, "model": {"name": "toy"}}
    front = container(pod_templates(render(values))["front"], "front")
    config = decode_config(configuration(front), FrontConfig, "front")
    assert (config.grpc_port, config.queue_max, config.strict_fields, config.model_names) == (6000, 9, True, ("toy",))


def test_the_probes_of_the_front() -> None:
    front = container(pod_templates(render({"front": {"grpcPort": 6000}}))["front"], "front")
    assert front["startupProbe"]["grpc"] == {"port": 6000}
    assert front["livenessProbe"]["httpGet"]["path"] == "/health"
    assert front["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_the_image_is_a_value() -> None:
    digest = "sha256:" + "a" * 64
    for image, expected in (
        ({"repository": "r.example/segue", "tag": "1.2"}, "r.example/segue:1.2"),
        ({"repository": "r.example/segue", "tag": "1.2", "digest": digest}, f"r.example/segue@{digest}"),
    ):
        used = {
            own["image"]
            for pod in pod_templates(render({"image": image})).values()
            for own in pod["spec"]["containers"]
        }
        assert used == {expected}


def test_redis_is_there_only_when_asked_for() -> None:
    assert "StatefulSet" not in {found["kind"] for found in render()}
    assert one(render({"redis": {"enabled": True}}), "StatefulSet")["spec"]["replicas"] == 1


@pytest.mark.parametrize(
    ("redis", "url"),
    [
        ({"enabled": True, "port": 6380}, "redis://demo-segue-redis:6380"),
        ({"url": "rediss://own.data:6379/1"}, "rediss://own.data:6379/1"),
    ],
)
def test_several_fronts_and_all_instances_meet_in_redis(redis: dict[str, Any], url: str) -> None:
    """Instances are told no address: those of the fronts are their pods', and come and go."""
    objects = render({"front": {"replicas": 3}, "redis": redis})
    deployment = one(objects, "Deployment")
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (3, {"type": "RollingUpdate"})
    front = decode_config(configuration(container(deployment["spec"]["template"], "front")), FrontConfig, "front")
    assert front.directory.redis_url == url
    for pod in pools(objects).values():
        own = decode_config(configuration(container(pod["template"], "instance")), WorkerConfig, "instance")
        assert (own.directory, own.conductors) == (front.directory, ())


def test_pages_that_come_over_tcp_need_no_shared_memory() -> None:
    values = {"decode": {"kvMemoryMi": 4096, "shmSizeMi": 64}}
    config = configuration(container(pools(render(values))["decode"], "instance"))
    assert decode_config(config, WorkerConfig, "decode").scheduler.kv_connector == "tcp"


def test_a_pair_on_gpus_is_warned_of() -> None:
    assert "WARNING" not in notes({"aggregated": {"gpus": 1, "maxReplicas": 1}})
    assert "K/V is not handed over between GPUs" in notes({"decode": {"gpus": 1}})


def test_a_pool_without_instances_is_left_out() -> None:
    assert set(pools(render())) == {"prefill", "decode"}


def test_the_notes_name_service_and_pools() -> None:
    text = notes({"decode": {"replicas": 2}})
    assert "http://demo-segue.llm:8000/v1" in text
    assert "decode: 2 (1 .. 4), CPU" in text


def test_long_release_names_stay_within_limits() -> None:
    assert all(len(found["metadata"]["name"]) <= 52 for found in render({"redis": {"enabled": True}}, name="r" * 53))


REFUSED: dict[str, Values] = {
    "/prefill/replicas": {"prefill": {"replicas": "two"}},
    "'prefil'": {"prefil": {}},
    "/decode/gpus": {"decode": {"gpus": 2}},
    "/front/replicas": {"front": {"replicas": 0}},
    "front.replicas: 2 fronts need Redis": {"front": {"replicas": 2}},
    "redis.url: give either": {"redis": {"enabled": True, "url": "redis://own:6379"}},
    "/redis/url": {"redis": {"url": "own:6379"}},
    "/front/grpcPort": {"front": {"grpcPort": 70000}},
    "/front/logLevel": {"front": {"logLevel": "loud"}},
    "/model/dtype": {"model": {"dtype": "int4"}},
    "/model/path": {"model": {"path": "models/$(HOME)"}},
    "/image/digest": {"image": {"digest": "latest"}},
    "/prefill/resources/limits/memory": {"prefill": {"resources": {"limits": {"memory": "8 GB"}}}},
    "decode.replicas": {"decode": {"replicas": 9}},
    "prefill.minReplicas": {"prefill": {"minReplicas": 3}},
    "decode.shmSizeMi": {"decode": {"shmSizeMi": 1024}, "scheduler": {"kvConnector": "auto"}},
    "/scheduler/kvConnector": {"scheduler": {"kvConnector": "rdma"}},
    "prefill.kvMemoryMi": {"prefill": {"kvMemoryMi": 0}},
    "prefill.maxReplicas and decode.maxReplicas": {"decode": {"replicas": 0, "minReplicas": 0, "maxReplicas": 0}},
    "aggregated.maxReplicas": {
        pool: {"replicas": 0, "minReplicas": 0, "maxReplicas": 0} for pool in ("prefill", "decode")
    },
}


@pytest.mark.parametrize("named", REFUSED)
def test_a_wrong_value_is_refused_by_name(named: str) -> None:
    with pytest.raises(helm_python.HelmError) as refusal:
        render(REFUSED[named])
    assert named in str(refusal.value)


def test_every_value_is_in_the_schema() -> None:
    """A value without a schema would be refused when it is set, and could not be checked."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert unknown(values, schema, schema["$defs"], "") == []


def unknown(values: Any, schema: dict[str, Any], definitions: dict[str, Any], path: str) -> list[str]:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if not isinstance(values, dict) or "properties" not in schema:
        return []
    known = schema["properties"]
    missing = [f"{path}.{key}" for key in values if key not in known]
    return missing + [
        deeper
        for key, value in values.items()
        if key in known
        for deeper in unknown(value, known[key], definitions, f"{path}.{key}")
    ]
