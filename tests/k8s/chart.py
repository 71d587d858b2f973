"""The chart, rendered by Helm's own engine, as Kubernetes objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parents[2] / "k8s" / "segue"

Values = dict[str, Any]
Object = dict[str, Any]


def render(values: Values | None = None, *, name: str = "demo") -> list[Object]:
    """Every object of the release, in no particular order."""
    rendered = helm_python.Chart.load(CHART).render(values or {}, name=name, namespace="llm")
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found is not None]


def notes(values: Values | None = None) -> str:
    rendered = helm_python.Chart.load(CHART).render(values or {}, name="demo", namespace="llm")
    return next(text for path, text in rendered.items() if path.endswith("NOTES.txt"))


def one(objects: list[Object], kind: str, suffix: str = "") -> Object:
    (found,) = [one for one in objects if one["kind"] == kind and one["metadata"]["name"].endswith(suffix)]
    return found


def pools(objects: list[Object]) -> dict[str, Object]:
    """Worker groups of the RayCluster by name."""
    return {group["groupName"]: group for group in one(objects, "RayCluster")["spec"]["workerGroupSpecs"]}


def container(pod: Object, name: str) -> Object:
    """`pod` is a pod template or a worker group."""
    template = pod.get("template", pod)
    return next(one for one in template["spec"]["containers"] if one["name"] == name)


def pod_templates(objects: list[Object]) -> dict[str, Object]:
    """Everything that becomes a pod, by component."""
    found = [one["spec"]["template"] for one in objects if one["kind"] in ("Deployment", "StatefulSet")]
    ray = one(objects, "RayCluster")["spec"]
    found += [ray["headGroupSpec"]["template"], *(group["template"] for group in ray["workerGroupSpecs"])]
    return {template["metadata"]["labels"]["app.kubernetes.io/component"]: template for template in found}
