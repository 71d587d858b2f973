"""Which model a request means, and its tokenizer, made once per card in a thread (Gemma's takes over a second)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor

import msgspec

from conductor.gateway.request_fields import ModelLimits
from conductor.gateway.text import TextCodec
from conductor.ports import ConductorPort, ServedModel
from segue.errors import ConfigError, InvalidField, Unavailable, UnknownModel

log = logging.getLogger(__name__)


class UsableModel(msgspec.Struct, frozen=True):
    served: ServedModel
    codec: TextCodec

    @property
    def name(self) -> str:
        return self.served.card.name

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(vocab_size=self.served.card.vocab_size, max_model_len=self.served.max_model_len)


class ModelCatalog:
    """`names_expected`: models of the configuration, known even while no instance serves them."""

    def __init__(self, conductor: ConductorPort, pool: Executor, names_expected: Sequence[str]) -> None:
        self._conductor = conductor
        self._pool = pool
        self._names_expected = tuple(names_expected)
        self._codecs: dict[str, asyncio.Task[TextCodec]] = {}
        self._closing = False

    def close(self) -> None:
        """No model can be used from now on."""
        self._closing = True

    def served(self) -> dict[str, ServedModel]:
        return self._conductor.models()

    def find(self, name: str) -> ServedModel:
        """`name` empty: the only model. Raises UnknownModel, Unavailable or InvalidField."""
        if self._closing:
            raise Unavailable("this gateway is shutting down")
        models = self._conductor.models()
        if not name:
            return self._only(models)
        if name in models:
            return models[name]
        if name in self._names_expected:
            raise Unavailable(f"model {name}: no prefill and decode instances are ready", field="model")
        known = ", ".join(sorted(models)) or "none"
        raise UnknownModel(f"model {name!r} is not served here; served: {known}", field="model")

    async def usable(self, name: str) -> UsableModel:
        served = self.find(name)
        key = served.card.digest or served.card.name
        task = self._codecs.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            loop = asyncio.get_running_loop()
            task = self._codecs[key] = loop.create_task(self._make(served))
        try:
            return UsableModel(served, await asyncio.shield(task))
        except ConfigError as error:
            log.error("model %s cannot be used: %s", served.card.name, error)
            raise Unavailable(f"model {served.card.name} cannot be served: {error}", field="model") from error

    async def _make(self, served: ServedModel) -> TextCodec:
        return await asyncio.get_running_loop().run_in_executor(self._pool, TextCodec, served.card)

    def _only(self, models: dict[str, ServedModel]) -> ServedModel:
        if len(models) == 1:
            return next(iter(models.values()))
        if not models:
            raise Unavailable("no model has ready prefill and decode instances", field="model")
        raise InvalidField("model", f"is empty, but several are served: {', '.join(sorted(models))}")
