"""The server under load: which model it serves, how long its context is, its tokenizer, its API's bodies."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from bench_client.prompts import PromptMaker
from bench_client.records import PlannedRequest
from segue.errors import ConfigError

ASK_TIMEOUT_S = 30.0
"""Questions before the run; a server that needs longer for `/v1/models` is not ready for a run."""

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class TargetError(ConfigError):
    """The server cannot be asked, or does not answer as this API does."""


class Model(msgspec.Struct, frozen=True):
    name: str
    context_tokens_max: int | None
    """As `/v1/models` says; None: it does not."""


class Target:
    """`http` has the server's base URL and headers; it is closed by whoever made it."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def model(self, wanted: str) -> Model:
        """The named model, or the only one. Raises TargetError."""
        listed = (await self._ask("GET", "/v1/models")).get("data")
        if not isinstance(listed, list) or not all(isinstance(entry, dict) and "id" in entry for entry in listed):
            raise TargetError(f"--url: {self._http.base_url}v1/models is no list of models")
        found = [entry for entry in listed if not wanted or entry["id"] == wanted]
        if len(found) != 1:
            names = ", ".join(str(entry["id"]) for entry in listed) or "none"
            raise TargetError(
                f"--model: {wanted!r} is not served; models: {names}" if wanted else f"--model: name one of: {names}"
            )
        length = found[0].get("max_model_len")
        return Model(str(found[0]["id"]), length if isinstance(length, int) else None)

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Ids without special tokens, from `/tokenize` as Segue and vLLM serve it."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        tokens = (await self._ask("POST", "/tokenize", body)).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token_id, int) for token_id in tokens):
            raise TargetError("--url: /tokenize does not answer with token ids; name ids with --token-ids")
        return tokens

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body, timeout=ASK_TIMEOUT_S)
            response.raise_for_status()
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise TargetError(
                f"--url: {method} {path}: {str(error).splitlines()[0] or type(error).__name__}"
            ) from error
        if not isinstance(answer, dict):
            raise TargetError(f"--url: {method} {path} does not answer with a JSON object")
        return answer


class BodyMaker:
    """Request bodies. The answer has exactly the planned length where the server honours `ignore_eos`."""

    def __init__(self, prompts: PromptMaker, *, endpoint: str, model: str, sampling: dict[str, Any]) -> None:
        self.path = PATHS[endpoint]
        self._chat = endpoint == "chat"
        self._prompts = prompts
        self._fixed = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **sampling}

    def body(self, planned: PlannedRequest) -> bytes:
        given: dict[str, Any] = {**self._fixed, "max_tokens": planned.tokens_output}
        if self._chat:
            given["messages"] = [{"role": "user", "content": self._prompts.text(planned)}]
        else:
            given["prompt"] = self._prompts.token_ids(planned)
        return msgspec.json.encode(given)
