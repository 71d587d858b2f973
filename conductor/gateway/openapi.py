"""The OpenAPI 3.1 document of the HTTP front, made from the records that requests are read into and the limits that
they are checked against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from conductor.gateway import validate
from conductor.gateway.openai_fields import ChatRequest, CompletionRequest
from conductor.gateway.openai_prompts import MESSAGES_MAX, ROLES
from segue import limits
from segue.errors import REQUEST_ERRORS

Schema = dict[str, Any]

TOKEN_ID: Schema = {"type": "integer", "minimum": 0}
TOKEN_IDS: Schema = {"type": "array", "items": TOKEN_ID, "minItems": 1}

BOUNDS: Mapping[str, Schema] = {
    "n": {"minimum": 1, "maximum": limits.N_MAX},
    "best_of": {"minimum": 1, "maximum": limits.N_MAX},
    "temperature": {"minimum": 0, "maximum": validate.TEMPERATURE_MAX},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -validate.PENALTY_MAX, "maximum": validate.PENALTY_MAX},
    "frequency_penalty": {"minimum": -validate.PENALTY_MAX, "maximum": validate.PENALTY_MAX},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": validate.REPETITION_PENALTY_MAX},
    "seed": {"minimum": -(1 << 63), "maximum": validate.SEED_MASK},
    "max_tokens": {"minimum": 0, "description": "0 only in completions with echo"},
    "max_completion_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "top_logprobs": {"minimum": 0, "maximum": limits.LOGPROBS_MAX},
    "prompt_logprobs": {"minimum": 0, "maximum": limits.LOGPROBS_MAX},
    "stop_token_ids": {"maxItems": limits.STOP_TOKEN_IDS_MAX},
    "priority": {"minimum": -limits.PRIORITY_ABS_MAX, "maximum": limits.PRIORITY_ABS_MAX},
    "logit_bias": {"maxProperties": limits.LOGIT_BIAS_MAX},
}
"""Beside the types that the records have."""

MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": MESSAGES_MAX,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": sorted(ROLES)},
            "name": {"type": "string"},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        },
                    },
                ]
            },
        },
    },
}

PROMPT: Schema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        TOKEN_IDS,
        {
            "type": "array",
            "minItems": 1,
            "maxItems": limits.PROMPTS_PER_CALL_MAX,
            "items": {"anyOf": [{"type": "string", "minLength": 1}, TOKEN_IDS]},
        },
    ]
}

ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def openapi_document(version: str, requests: Mapping[str, type[msgspec.Struct]], probes: Sequence[str]) -> Schema:
    """`requests`: path of each POST and the record that its body is read into; `probes`: paths of GETs."""
    references, schemas = msgspec.json.schema_components(
        list(requests.values()), ref_template="#/components/schemas/{name}"
    )
    for record in (ChatRequest, CompletionRequest):
        _bound(schemas[record.__name__]["properties"])
    paths: Schema = {
        path: {"post": _post(path, reference)} for path, reference in zip(requests, references, strict=True)
    }
    paths |= {path.replace("{name:path}", "{name}"): {"get": _get(path)} for path in probes}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Segue", "version": version},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": ERROR}},
    }


def _bound(properties: Schema) -> None:
    for name in properties.keys() & BOUNDS.keys():
        properties[name].update(BOUNDS[name])
    if "messages" in properties:
        properties["messages"] = MESSAGES
    else:
        properties["prompt"] = PROMPT
        properties["logprobs"].update(minimum=0, maximum=limits.LOGPROBS_MAX)


def _post(path: str, reference: Schema) -> Schema:
    body = {"required": True, "content": {"application/json": {"schema": reference}}}
    return {"operationId": _name("post", path), "requestBody": body, "responses": _responses("a JSON object")}


def _get(path: str) -> Schema:
    operation: Schema = {"operationId": _name("get", path), "responses": _responses("as docs/api.md says")}
    if "{name:path}" in path:
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": schema}]
    return operation


def _responses(good: str) -> Schema:
    """Every status of the error table, and 500 for what would be our bug."""
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    statuses = sorted({kind.http_status for kind in REQUEST_ERRORS.values()} | {500})
    return {"200": {"description": good}, **{str(status): {"description": "error", **error} for status in statuses}}


def _name(method: str, path: str) -> str:
    words = path.replace("{name:path}", "one").strip("/").replace("/", "_").replace(".", "_")
    return f"{method}_{words}"
