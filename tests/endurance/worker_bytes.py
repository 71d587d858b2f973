"""What a broken or hostile instance would send to a Conductor and to a gateway, made from seeds: messages as bytes."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from fuzz_bytes import HOSTILE, mangled
from segue_proto.v1 import inference_pb2, worker_pb2

from segue.ids import InstanceRef
from segue.kv_layout import KvLayout
from segue.manifest import InstanceManifest, Role
from segue.model_card import ModelCard
from segue.wire_version import METADATA_KEY, WIRE_VERSION

STRANGER_ROOT = "ee" * 32
"""K/V that fits none of the cluster's instances: whoever gets in is paired with nobody and serves nothing."""

CARD = ModelCard(
    name="toy",
    architecture="llama",
    vocab_size=32,
    max_model_len=200,
    tokenizer_json="{}",
    chat_template=None,
    digest="stranger",
)
NUMBERS = (0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1)
NAMES = ("", "r", "prefill-0", "decode-0", "\x00", "w" * 5000, "r~gateway")
WHOLE_PERCENT = 70
"""Of messages that are well-formed protobuf, whatever is in them."""


def stream_bytes(method: str, rng: random.Random) -> list[bytes]:
    """The messages of one stream of `Attach` or `Push`."""
    messages = attach_messages(rng) if method == "Attach" else [batch(rng) for _ in range(rng.randint(1, 6))]
    return [_whole_or_not(message.SerializeToString(), rng) for message in messages]


def stream_metadata(method: str, rng: random.Random) -> tuple[tuple[str, str], ...]:
    if method == "Push" and rng.random() < 0.9:
        return ((METADATA_KEY, str(WIRE_VERSION)),)
    return ((METADATA_KEY, rng.choice(["", "x", "-1", "9" * 600])),)


def attach_messages(rng: random.Random) -> list[worker_pb2.WorkerMessage]:
    """A registration that is accepted now and then, and what may come after it."""
    manifest, card = _record(_manifest(rng), rng), _record(CARD, rng)
    first = [
        worker_pb2.WorkerMessage(register=worker_pb2.Register(manifest=manifest)),
        worker_pb2.WorkerMessage(card=worker_pb2.ModelCardAsset(digest=rng.choice(["stranger", ""]), card=card)),
    ]
    rest = [_worker_message(rng) for _ in range(rng.randint(0, 6))]
    return [*first[rng.random() < 0.1 :], *rest]


def batch(rng: random.Random) -> worker_pb2.TokenBatch:
    deltas = [_delta(rng) for _ in range(rng.randint(0, 5))]
    return worker_pb2.TokenBatch(ref=_ref(rng), name=rng.choice(NAMES), deltas=deltas)


def _whole_or_not(data: bytes, rng: random.Random) -> bytes:
    if rng.random() * 100 < WHOLE_PERCENT:
        return data
    return mangled(data, rng) if rng.random() < 0.8 else rng.randbytes(rng.randrange(300))


def _ref(rng: random.Random) -> worker_pb2.InstanceRef:
    return worker_pb2.InstanceRef(uuid=rng.choice(NAMES), incarnation=rng.choice([0, 1, 2**64 - 1]))


def _manifest(rng: random.Random) -> InstanceManifest:
    name = f"stranger-{rng.randrange(10**9)}"
    return InstanceManifest(
        ref=InstanceRef(name, rng.randrange(1, 10**9)),
        name=name,
        role=rng.choice(list(Role)),
        host="host",
        pid=1,
        model="toy",
        card_digest="stranger",
        kv_root=STRANGER_ROOT,
        layout=KvLayout(layers=1, kv_heads=1, head_dim=4, block_size=4, dtype="float32"),
        pages_total=64,
        max_model_len=200,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        control_address="tcp://127.0.0.1:1",
        events_address="tcp://127.0.0.1:1",
    )


def _record(value: msgspec.Struct, rng: random.Random) -> bytes:
    """As msgpack: right half of the time, else with hostile values in some fields."""
    fields: dict[str, Any] = msgspec.to_builtins(value)
    if rng.random() < 0.5:
        for name in rng.sample(sorted(fields), 2):
            fields[name] = rng.choice([each for each in HOSTILE if each != 10**40])  # not an integer of msgpack
    try:
        return msgspec.msgpack.encode(fields)
    except (OverflowError, UnicodeEncodeError):
        return b"\xc1"


def _worker_message(rng: random.Random) -> worker_pb2.WorkerMessage:
    key = {"request_id": rng.choice(NAMES), "attempt": rng.choice(NUMBERS)}
    match rng.randrange(6):
        case 0 | 1:
            kind = rng.choice([*range(12), 99])
            counts = {name: rng.choice(NUMBERS) for name in ("tokens_cached", "tokens_generated")}
            outcome = worker_pb2.Outcome(**key, kind=kind, reason=rng.choice(NAMES), **counts)
            return worker_pb2.WorkerMessage(outcome=outcome)
        case 2:
            beat = worker_pb2.WorkerHeartbeat(steps=2**64 - 1, draining=rng.random() < 0.5)
            return worker_pb2.WorkerMessage(heartbeat=beat)
        case 3:
            live = worker_pb2.LiveAttempts(attempts=[worker_pb2.AttemptKey(**key)] * rng.randrange(50))
            return worker_pb2.WorkerMessage(live=live)
        case 4:
            return worker_pb2.WorkerMessage(register=worker_pb2.Register(manifest=_record(_manifest(rng), rng)))
        case _:
            return worker_pb2.WorkerMessage()


def _delta(rng: random.Random) -> worker_pb2.TokenDelta:
    numbers = {name: rng.choice(NUMBERS) for name in ("attempt", "position", "tokens_cached", "queue_us", "compute_us")}
    entry = inference_pb2.TokenLogprobs(logprob=float("nan"))
    return worker_pb2.TokenDelta(
        request_id=rng.choice(NAMES),
        token_ids=[rng.choice(NUMBERS) for _ in range(rng.randrange(5))],
        logprobs=[entry] * rng.randrange(3),
        finish=rng.choice([0, 1, 2, 3, 4, 77]),
        error=rng.choice(NAMES),
        from_prefill=rng.random() < 0.5,
        scores=worker_pb2.PromptScores(position=5, alternatives=rng.choice(NUMBERS), ranks=[1] * rng.randrange(4)),
        **numbers,
    )
