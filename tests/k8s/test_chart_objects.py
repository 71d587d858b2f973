"""What the chart renders is valid Kubernetes, and its parts fit together."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import pytest
from chart import CHART, Object, Values, container, one, pod_templates, render

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its import uses a deprecated part of the standard library on some versions
    import kubernetes_validate

KUBERNETES = "1.34"
RAY_SCHEMA = json.loads((Path(__file__).parent / "raycluster.schema.json").read_text())

GPU_POOL = {"gpus": 1, "kvMemoryMi": 0, "nodeSelector": {"gpu": "h200"}, "tolerations": [{"operator": "Exists"}]}
VARIANTS: dict[str, Values] = {
    "defaults": {},
    "gpu": {"prefill": GPU_POOL, "decode": GPU_POOL},
    "redis": {"redis": {"enabled": True, "storage": {"storageClassName": "fast"}}},
    "aggregated": {
        "prefill": {"replicas": 0, "minReplicas": 0, "maxReplicas": 0},
        "decode": {"replicas": 0, "minReplicas": 0, "maxReplicas": 0},
        "aggregated": {"replicas": 2, "minReplicas": 1, "maxReplicas": 3},
    },
    "everything": {
        "fullnameOverride": "llm",
        "image": {"repository": "registry.example/segue", "digest": "sha256:" + "0" * 64},
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccount": {"name": "runner", "annotations": {"a": "b"}},
        "model": {"volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}},
        "ray": {"autoscaling": True, "head": {"nodeSelector": {"pool": "cpu"}}},
        "redis": {"enabled": True},
        "front": {
            "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
            "affinity": {"podAntiAffinity": {}},
            "podAnnotations": {"a": "b"},
        },
        "decode": {"podAnnotations": {"a": "b"}, "affinity": {"nodeAffinity": {}}},
    },
}


@pytest.fixture(params=VARIANTS, scope="module")
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render(VARIANTS[request.param])


def test_lint_finds_nothing() -> None:
    report = helm_python.lint(CHART, strict=True)
    assert report["errors"] == []
    assert {message["error"] for message in report["messages"]} <= {"icon is recommended"}


def test_built_in_kinds_are_valid(objects: list[Object]) -> None:
    for found in objects:
        if found["kind"] != "RayCluster":
            kubernetes_validate.validate(found, KUBERNETES, strict=True)


def test_the_ray_cluster_has_only_known_fields(objects: list[Object]) -> None:
    jsonschema.validate(one(objects, "RayCluster"), RAY_SCHEMA)


def test_pods_of_the_ray_cluster_are_valid(objects: list[Object]) -> None:
    for component, template in pod_templates(objects).items():
        metadata = {"name": component, **template["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_no_field_is_null(objects: list[Object]) -> None:
    assert [path for found in objects for path in nulls(found, found["kind"])] == []


def nulls(value: Any, path: str) -> list[str]:
    if isinstance(value, dict):
        return [deeper for key, item in value.items() for deeper in nulls(item, f"{path}.{key}")]
    if isinstance(value, list):
        return [deeper for index, item in enumerate(value) for deeper in nulls(item, f"{path}[{index}]")]
    return [path] if value is None else []


def test_every_selector_selects_exactly_one_component(objects: list[Object]) -> None:
    templates = pod_templates(objects)
    for found in objects:
        selector = found.get("spec", {}).get("selector")
        if selector is None:
            continue
        wanted = selector.get("matchLabels", selector).items()
        met = [name for name, template in templates.items() if wanted <= template["metadata"]["labels"].items()]
        assert len(met) == 1, (found["kind"], found["metadata"]["name"], met)


def test_probes_ask_ports_that_the_container_has(objects: list[Object]) -> None:
    for template in pod_templates(objects).values():
        for own in template["spec"]["containers"]:
            known = {key for port in own.get("ports", ()) for key in (port["name"], port["containerPort"])}
            asked = [
                check["port"]
                for name in ("startupProbe", "livenessProbe", "readinessProbe")
                for kind, check in own.get(name, {}).items()
                if kind in ("grpc", "httpGet", "tcpSocket")
            ]
            assert set(asked) <= known, (own["name"], asked)


def test_services_lead_to_ports_of_their_pods(objects: list[Object]) -> None:
    templates = pod_templates(objects)
    for service in (found for found in objects if found["kind"] == "Service"):
        component = service["spec"]["selector"]["app.kubernetes.io/component"]
        ports = {port["name"] for own in templates[component]["spec"]["containers"] for port in own.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_volume_mounts_have_their_volumes(objects: list[Object]) -> None:
    claims = {"data"}  # of Redis, from a claim template
    for template in pod_templates(objects).values():
        volumes = {volume["name"] for volume in template["spec"].get("volumes", ())} | claims
        mounts = {mount["name"] for own in template["spec"]["containers"] for mount in own["volumeMounts"]}
        assert mounts <= volumes


def test_no_pod_may_become_root_or_keeps_capabilities(objects: list[Object]) -> None:
    for template in pod_templates(objects).values():
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        for own in template["spec"]["containers"]:
            assert own["securityContext"]["allowPrivilegeEscalation"] is False
            assert own["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in own["resources"]["limits"]


def test_instances_find_the_front_before_it_is_ready(objects: list[Object]) -> None:
    """Readiness waits for instances: a service of ready pods only would keep them from ever registering."""
    service = one(objects, "Service", "-workers")
    assert service["spec"]["publishNotReadyAddresses"] is True
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    instances = [container(pod, "instance") for role, pod in pod_templates(objects).items() if role in ROLES]
    assert instances
    for instance in instances:
        config = json.loads(next(entry["value"] for entry in instance["env"] if entry["name"] == "SEGUE_CONFIG"))
        by_redis = bool(config["directory"]["redis_url"])  # which names the fronts' pods
        assert config["conductors"] == ([] if by_redis else [f"{name}:{port}"])


ROLES = ("prefill", "decode", "aggregated")
