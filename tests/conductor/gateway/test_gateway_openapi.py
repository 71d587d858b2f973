"""The OpenAPI document says what the front does: its paths, its fields, its bounds."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import jsonschema
import pytest
from gateway_front import Front

from conductor.gateway.openapi import BOUNDS

Start = Callable[..., Awaitable[Front]]
BODY = {"model": "toy", "prompt": "hello"}
WHOLE = ("n", "top_k", "seed", "max_tokens", "min_tokens", "prompt_logprobs", "best_of", "logprobs", "priority")
NUMBERS = sorted(name for name, bound in BOUNDS.items() if {"minimum", "exclusiveMinimum"} & bound.keys())
IN_COMPLETIONS = [name for name in NUMBERS if name not in ("max_completion_tokens", "top_logprobs")]


async def fetch(front: Front) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=front.http_url, trust_env=False) as client:
        document: dict[str, Any] = (await client.get("/openapi.json")).raise_for_status().json()
    return document


async def test_the_document_has_the_paths_of_the_application(start: Start) -> None:
    front = await start()
    document = await fetch(front)
    routes = {route.path.replace("{name:path}", "{name}") for route in front.gateway.http_app.router.routes}
    assert set(document["paths"]) == routes
    assert document["openapi"].startswith("3.1")


def just_outside(bound: dict[str, Any], name: str) -> list[float]:
    step = 1 if name in WHOLE else 0.001
    least, most = bound.get("minimum"), bound.get("maximum")
    found = [bound["exclusiveMinimum"]] if "exclusiveMinimum" in bound else [least - step]
    return found if most is None else [*found, most + step]


@pytest.mark.parametrize("name", IN_COMPLETIONS)
async def test_what_the_document_excludes_is_refused_by_name(start: Start, name: str) -> None:
    front = await start()
    schema = (await fetch(front))["components"]["schemas"]["CompletionRequest"]["properties"][name]
    async with httpx.AsyncClient(base_url=front.http_url, trust_env=False) as client:
        for value in just_outside(schema, name):
            assert not jsonschema.Draft202012Validator(schema).is_valid(value)
            answer = await client.post("/v1/completions", json={**BODY, name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text


@pytest.mark.parametrize("name", [name for name in IN_COMPLETIONS if name not in ("max_tokens", "seed", "best_of")])
async def test_what_the_document_allows_at_its_ends_is_accepted(start: Start, name: str) -> None:
    front = await start()
    bound = BOUNDS[name]
    least = bound.get("minimum", math.ulp(1.0))
    async with httpx.AsyncClient(base_url=front.http_url, trust_env=False) as client:
        for value in (least, bound.get("maximum", least)):
            answer = await client.post("/v1/completions", json={**BODY, name: value})
            assert answer.status_code == 200, answer.text
