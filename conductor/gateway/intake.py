"""From what a front door read to a live request: tokenise, validate, hash, open. The same path for gRPC and HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager

import msgspec

from conductor.gateway.hash_chain import tenant_chain
from conductor.gateway.live_request import LiveRequest
from conductor.gateway.model_catalog import ModelCatalog, UsableModel
from conductor.gateway.request_fields import CheckedRequest, SamplingFields
from conductor.gateway.request_table import RequestTable
from conductor.gateway.session_events import SessionSpec
from conductor.gateway.validate import check_prompt_length, validate
from conductor.tenant_limits import TenantLimiter
from segue.errors import Overloaded

TEXTS_PENDING_MAX = 512
"""Texts at or waiting for the tokenizer's threads: a body of 32 MB occupies one for some ten seconds."""

RETRY_AFTER_MS = 1000

HASH_INLINE_TOKENS_MAX = 16_384
"""Longer prompts are hashed in a thread: 16k tokens at 16 per block are 1024 hashes, about 1 ms."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a client's call beside its prompt."""

    request_id: str
    arrived_us: int
    deadline_us: int = 0
    tenant: str = ""
    priority: int = 0
    prompt_only: bool = False
    tokens_free: bool = False
    """A further choice of a prompt that is charged already."""


class Intake:
    def __init__(
        self, catalog: ModelCatalog, table: RequestTable, pool: Executor, tenants: TenantLimiter, tenant_secret: bytes
    ) -> None:
        self.catalog = catalog
        self.table = table
        self._pool = pool
        self._tenants = tenants
        self.tenant_secret = tenant_secret
        self._texts_pending = 0

    async def tokenize(self, model: UsableModel, text: str, *, add_bos: bool = True, name: str = "prompt") -> list[int]:
        """Refuses a text that cannot possibly fit before spending time on it."""
        check_prompt_length(model.codec.tokens_at_least(text), model.limits, name, at_least=True)
        with self._pending_text():
            return await model.codec.encode(text, self._pool, add_bos=add_bos)

    async def tokenize_chat(self, model: UsableModel, rendered: str) -> list[int]:
        check_prompt_length(model.codec.tokens_at_least(rendered), model.limits, "messages", at_least=True)
        with self._pending_text():
            return await model.codec.encode_chat(rendered, self._pool)

    @contextmanager
    def _pending_text(self) -> Iterator[None]:
        if self._texts_pending >= TEXTS_PENDING_MAX:
            message = f"{TEXTS_PENDING_MAX} prompts wait for the tokenizer"
            raise Overloaded(message, resource="tokenizer", retry_after_ms=RETRY_AFTER_MS)
        self._texts_pending += 1
        try:
            yield
        finally:
            self._texts_pending -= 1

    def check(
        self, model: UsableModel, prompt_ids: Sequence[int], fields: SamplingFields, *, max_tokens_default: int | None
    ) -> CheckedRequest:
        seed = secrets.randbits(63)
        return validate(fields, prompt_ids, model.limits, seed_drawn=seed, max_tokens_default=max_tokens_default)

    def check_choices(self, choices: int) -> None:
        """Raises InvalidField when no free place of the tenant could ever hold so many."""
        self._tenants.check_choices(choices)

    async def open(self, model: UsableModel, call: Call, checked: CheckedRequest, wake: asyncio.Event) -> LiveRequest:
        """Raises the RequestError with which the request ended at once."""
        self.table.check_id_free(call.request_id)
        chain = tenant_chain(model.served, self.tenant_secret, call.tenant)
        if checked.tokens_prompt > HASH_INLINE_TOKENS_MAX:
            await asyncio.get_running_loop().run_in_executor(self._pool, chain.over, checked.prompt_ids)
        spec = SessionSpec(
            request_id=call.request_id,
            model=model.name,
            prompt_ids=checked.prompt_ids,
            tokens_prompt=checked.tokens_prompt,
            sampling=checked.sampling,
            arrived_us=call.arrived_us,
            tokenized_us=max(self.table.now_us() - call.arrived_us, 1),
            deadline_us=call.deadline_us,
            tenant=call.tenant,
            priority=call.priority,
            prompt_only=call.prompt_only,
        )
        text = model.codec.stream(
            checked.stops,
            skip_special_tokens=checked.skip_special_tokens,
            tokens_free=checked.sampling.min_tokens,
        )
        ticket = await self._tenants.admit(call.tenant, 0 if call.tokens_free else checked.tokens_prompt)
        try:
            return self.table.open(spec, text, chain, wake, ticket)
        except BaseException:
            if ticket is not None:
                self._tenants.end(ticket)
            raise


def choice_seed(seed: int, choice: int) -> int:
    """Seeds of `n` choices: the first is the request's own, the others independent of it and of each other."""
    if choice == 0:
        return seed
    digest = hashlib.sha256(seed.to_bytes(8, "little") + choice.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:8], "little")
