"""Fakes for whoever tests a front door without workers: a Conductor that plays scripts, and toy model cards."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from conductor.core.decision_log import Explanation
from conductor.gateway.token_pieces import BYTE_OF_CHARACTER
from conductor.ports import (
    ClusterView,
    GatewayPort,
    InstanceView,
    Placement,
    ReceivedTokens,
    RoutedRequest,
    ServedModel,
)
from segue.errors import RequestError
from segue.ids import InstanceRef
from segue.kv_events import LoadReport
from segue.kv_layout import KvLayout
from segue.manifest import InstanceManifest, Role
from segue.model_card import ModelCard
from segue.plan import PromptScores, TokenLogprobs

PREFILL = InstanceRef("uuid-p0", 1)
DECODE = InstanceRef("uuid-d0", 1)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WORDS = ("the", "and", "ing", "hello", "world", " the", " world", "stop", "END")


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What the pretended instances do with one request. `tokens` is the whole answer, of which later attempts play what
    is left; `fail_after` ends an attempt after that many of its tokens; `hang` never finishes."""

    tokens: list[int] = []
    finish: str = "stop"
    error: str = ""
    logprobs: list[TokenLogprobs] | None = None
    tokens_cached: int = 0
    fail_after: int | None = None
    reject: RequestError | None = None
    refuse: RequestError | None = None
    """Raised from `submit`; `reject` comes later through the GatewayPort."""
    hang: bool = False
    step_s: float = 0.0
    tokens_per_step: int = 1


class FakeConductor:
    """A ConductorPort. `reply` chooses the script of each attempt; `deliver` is the gateway's `table.on_tokens`."""

    def __init__(self, cards: list[ModelCard], reply: Callable[[RoutedRequest], Script], *, max_model_len: int = 0):
        self.submitted: list[RoutedRequest] = []
        self.finished: list[tuple[str, str]] = []
        self.explained: dict[str, list[Explanation]] = {}
        self.reply = reply
        self.deliver: Callable[[ReceivedTokens], Any] = lambda received: None
        self.served = {card.name: toy_served(card, max_model_len or card.max_model_len) for card in cards}
        self._plays: dict[str, asyncio.Task[None]] = {}

    def models(self) -> dict[str, ServedModel]:
        return self.served

    def submit(self, request: RoutedRequest, gateway: GatewayPort) -> None:
        self.submitted.append(request)
        script = self.reply(request)
        if script.refuse is not None:
            raise script.refuse
        play = asyncio.get_running_loop().create_task(self._play(request, script, gateway))
        self._plays[request.request_id] = play

    def finish(self, request_id: str, reason: str) -> None:
        self.finished.append((request_id, reason))
        play = self._plays.pop(request_id, None)
        if play is not None and play is not asyncio.current_task():
            play.cancel()

    def explain(self, request_id: str) -> list[Explanation]:
        return self.explained.get(request_id, [])

    def recent_decisions(self, count: int) -> list[tuple[int, Explanation]]:
        """Each a second older than the one before."""
        entries = [entry for entries in self.explained.values() for entry in entries]
        return [(age_s * 1_000_000, entry) for age_s, entry in enumerate(reversed(entries))][:count]

    def cluster(self) -> ClusterView:
        instances = [toy_instance("p0", PREFILL, Role.PREFILL), toy_instance("d0", DECODE, Role.DECODE)]
        return ClusterView(instances=instances, models=list(self.served.values()), requests_queued=0)

    async def _play(self, request: RoutedRequest, script: Script, gateway: GatewayPort) -> None:
        await asyncio.sleep(0)
        if script.reject is not None:
            gateway.on_rejected(request.request_id, request.attempt, script.reject)
            return
        gateway.on_placed(request.request_id, request.attempt, Placement(prefill="p0", decode="d0"))
        steps = self._steps(request, script)
        for received in scores_of(request):
            self.deliver(received)
        for index, received in enumerate(steps):
            await asyncio.sleep(script.step_s)
            self.deliver(received)
            if index == 0:
                gateway.on_handoff_complete(request.request_id, request.attempt)
        if script.fail_after is not None:
            gateway.on_attempt_failed(request.request_id, request.attempt, "instance d0 is lost")

    def _steps(self, request: RoutedRequest, script: Script) -> list[ReceivedTokens]:
        """One message per step, the first from prefill; the last one carries the finish."""
        start = len(request.token_ids) // 4
        done = start - request.tokens_prompt
        tokens = script.tokens[done : request.sampling.max_tokens]
        finish = script.finish if len(script.tokens) <= request.sampling.max_tokens else "length"
        if script.fail_after is not None:
            tokens = tokens[: script.fail_after]
        silent = script.hang or script.fail_after is not None
        cuts = [0, *range(1, len(tokens), script.tokens_per_step), len(tokens)] if tokens else [0, 0]
        return [
            self._message(request, script, done, tokens, begin, end, "" if silent or end < len(tokens) else finish)
            for begin, end in itertools.pairwise(cuts)
        ]

    def _message(
        self, request: RoutedRequest, script: Script, done: int, tokens: list[int], begin: int, end: int, finish: str
    ) -> ReceivedTokens:
        logprobs = None if script.logprobs is None else script.logprobs[done + begin : done + end]
        return ReceivedTokens(
            ref=PREFILL if begin == 0 else DECODE,
            instance="p0" if begin == 0 else "d0",
            request_id=request.request_id,
            attempt=request.attempt,
            position=request.tokens_prompt + done + begin,
            token_ids=tokens[begin:end],
            logprobs=logprobs,
            finish=finish,
            error=script.error,
            tokens_cached=script.tokens_cached,
            from_prefill=begin == 0,
            queue_us=10,
            compute_us=20,
        )


def pretended_scores(tokens_prompt: int, alternatives: int, position: int = 1) -> PromptScores:
    """Of the tokens from `position` on: values that tell the positions apart."""
    positions = range(position, tokens_prompt)
    return PromptScores(
        position=position,
        alternatives=alternatives,
        logprobs=[-at / 8 for at in positions],
        ranks=[1 + at for at in positions],
        top_ids=list(range(alternatives)) * len(positions),
        top_logprobs=[-place / 4 for _ in positions for place in range(alternatives)],
    )


def scores_of(request: RoutedRequest) -> list[ReceivedTokens]:
    """What a prefill instance says of a prompt that is to be scored: two chunks, the second one repeating a token."""
    alternatives = request.sampling.prompt_logprobs
    if alternatives is None:
        return []
    middle = 1 + request.tokens_prompt // 2
    first = pretended_scores(middle, alternatives)
    second = pretended_scores(request.tokens_prompt, alternatives, max(middle - 1, 1))
    return [
        ReceivedTokens(
            ref=PREFILL,
            instance="p0",
            request_id=request.request_id,
            attempt=request.attempt,
            position=len(request.token_ids) // 4,
            token_ids=[],
            logprobs=None,
            finish="",
            error="",
            tokens_cached=0,
            from_prefill=True,
            queue_us=0,
            compute_us=0,
            scores=scores,
        )
        for scores in (first, second)
    ]


def toy_served(card: ModelCard, max_model_len: int) -> ServedModel:
    return ServedModel(card=card, kv_root=b"r" * 32, block_size=16, max_model_len=max_model_len)


def toy_instance(name: str, ref: InstanceRef, role: Role) -> InstanceView:
    manifest = InstanceManifest(
        ref=ref,
        name=name,
        role=role,
        host="boot-id",
        pid=1,
        model="toy",
        card_digest="",
        kv_root="00",
        layout=KvLayout(layers=1, kv_heads=1, head_dim=8, block_size=16, dtype="float32"),
        pages_total=100,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        control_address="",
        events_address="",
    )
    load = LoadReport(
        ref=ref,
        sequence=1,
        running=1,
        waiting=2,
        tokens_queued=30,
        tokens_running=40,
        pages_free=60,
        pages_active=20,
        pages_cached=15,
        pages_held=5,
        pages_quarantined=0,
        pages_total=100,
        step_us=1000,
    )
    return InstanceView(manifest=manifest, load=load, draining=False)


def byte_level_tokenizer() -> Tokenizer:
    """256 byte tokens, a few words, ChatML's two special tokens: every text can be expressed."""
    vocab = dict(BYTE_OF_CHARACTER.items())
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        _add_word(word.replace(" ", "\u0120"), vocab, merges)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return tokenizer


def sentence_piece_tokenizer() -> Tokenizer:
    """Llama-2-like: `<0xNN>` fallback, U+2581 for spaces, a leading space that decoding strips."""
    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"abcdefghijklmnopqrstuvwxyz.",
    ]
    vocab = {name: index for index, name in enumerate(names)}
    merges: list[tuple[str, str]] = []
    for word in ("\u2581the", "\u2581hello", "ing"):
        _add_word(word, vocab, merges)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


def _add_word(word: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Every prefix of `word` becomes a token, merged from left to right."""
    for length in range(2, len(word) + 1):
        if word[:length] not in vocab:
            vocab[word[:length]] = len(vocab)
            merges.append((word[: length - 1], word[length - 1]))


def toy_card(tokenizer: Tokenizer | None = None, *, name: str = "toy", max_model_len: int = 256) -> ModelCard:
    """Byte level unless a tokenizer is given."""
    tokenizer = tokenizer or byte_level_tokenizer()
    eos = tokenizer.token_to_id("<|im_end|>")
    return ModelCard(
        name=name,
        architecture="toy",
        vocab_size=tokenizer.get_vocab_size(),
        max_model_len=max_model_len,
        tokenizer_json=tokenizer.to_str(),
        chat_template=CHATML,
        eos_ids=() if eos is None else (eos,),
        special_tokens={"eos_token": "<|im_end|>"},
        digest=f"digest-of-{name}",
    )
