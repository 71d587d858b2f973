"""Everything of the HTTP front beside completions: models, health, version, tokens, metrics."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from conductor.gateway.http_body import convert, read_object
from conductor.gateway.http_errors import error_response, json_response
from conductor.gateway.intake import Intake
from conductor.gateway.openai_prompts import template_messages
from conductor.gateway.validate import check_prompt
from conductor.gateway.wall_clock import unix_seconds
from conductor.ports import ServedModel
from segue.errors import InvalidField, Unavailable, UnknownModel


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str = ""
    skip_special_tokens: bool = False


class ServiceApi:
    def __init__(self, intake: Intake, registry: CollectorRegistry, version: str) -> None:
        self._intake = intake
        self._registry = registry
        self.version_name = version
        self._started_s = unix_seconds()

    async def models(self, http: Request) -> Response:
        served = self._intake.catalog.served()
        return json_response({"object": "list", "data": [self._model(name, served[name]) for name in sorted(served)]})

    async def model(self, http: Request) -> Response:
        name = str(http.path_params["name"])
        if not name:
            raise UnknownModel("the path names no model; GET /v1/models lists them", field="model")
        return json_response(self._model(name, self._intake.catalog.find(name)))

    async def health(self, http: Request) -> Response:
        """The process lives; says nothing of instances."""
        return json_response({"status": "ok"})

    async def ready(self, http: Request) -> Response:
        """Not raised: a probe while instances load is no request that failed, and is not counted as one."""
        served = self._intake.catalog.served()
        if not served:
            return error_response(Unavailable("no model has ready prefill and decode instances"))
        return json_response({"status": "ready", "models": sorted(served)})

    async def version(self, http: Request) -> Response:
        return json_response({"version": self.version_name})

    async def metrics(self, http: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def tokenize(self, http: Request) -> Response:
        request = convert(await read_object(http), TokenizeRequest)
        model = await self._intake.catalog.usable(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidField("prompt", "give either prompt or messages")
        if request.messages is not None:
            rendered = model.codec.render_chat(
                template_messages(request.messages),
                add_generation_prompt=request.add_generation_prompt,
                variables=request.chat_template_kwargs,
            )
            tokens = await self._intake.tokenize_chat(model, rendered)
        else:
            tokens = await self._intake.tokenize(model, request.prompt or "", add_bos=request.add_special_tokens)
        texts = [model.codec.token_text(token_id) for token_id in tokens] if request.return_token_strs else None
        found = {"count": len(tokens), "max_model_len": model.limits.max_model_len}
        return json_response({**found, "tokens": tokens, "token_strs": texts})

    async def detokenize(self, http: Request) -> Response:
        request = convert(await read_object(http), DetokenizeRequest)
        model = await self._intake.catalog.usable(request.model)
        check_prompt(request.tokens, model.limits, "tokens")
        text = model.codec.decode(request.tokens, skip_special_tokens=request.skip_special_tokens)
        return json_response({"prompt": text})

    def _model(self, name: str, served: ServedModel) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "segue",
            "max_model_len": served.max_model_len,
        }
