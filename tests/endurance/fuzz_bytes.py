"""Malformed requests, made from seeds: what a broken client, a broken network or somebody malicious would send."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

from segue_proto.v1 import inference_pb2

HOSTILE_NUMBERS: tuple[Any, ...] = (0, -1, 1, 2**31, 2**32 - 1, 2**63, 2**64, 10**40, 0.5, 1e308, -1e-320, 17, 4096)
HOSTILE_TEXTS = (
    "",
    "\x00",
    "\ud800",
    "\U0010ffff" * 3,
    "a" * 5000,
    "w1 ",
    "\u202e\u0301",
    "{{ 1/0 }}",
    "%n%s",
    "../..",
)
HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": {}},
    [1, "a"],
    *HOSTILE_NUMBERS,
    *HOSTILE_TEXTS,
)

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "w1 "}], "max_tokens": 2}
TEXT = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": 2}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {**CHAT, "temperature": 1, "logprobs": True, "top_logprobs": 2, "stop": ["x"], "n": 2}),
    ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {**TEXT, "echo": True, "logprobs": 1, "best_of": 2, "logit_bias": {"5": 1}, "seed": 3}),
    ("/v1/completions", {**TEXT, "stream": True, "min_p": 0.1, "top_k": 5, "top_p": 0.9, "stop_token_ids": [4]}),
    ("/v1/completions", {**TEXT, "prompt": ["w1 ", "w2 "], "prompt_logprobs": 1, "presence_penalty": 1}),
    ("/tokenize", {"model": "toy", "prompt": "w1 w2 "}),
    ("/tokenize", {"model": "toy", "messages": CHAT["messages"], "return_token_strs": True}),
    ("/detokenize", {"model": "toy", "tokens": [1, 2, 3]}),
)


def mangled(data: bytes, rng: random.Random) -> bytes:
    """A few bits flipped, bytes cut out, repeated or put in, or the end cut off."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(5):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                del found[at : at + rng.randint(1, 9)]
            case 2:
                found[at:at] = found[at : at + rng.randint(1, 9)]
            case 3:
                found[at:at] = rng.randbytes(rng.randint(1, 9))
            case _:
                del found[at:]
    return bytes(found)


def http_request(rng: random.Random) -> tuple[str, bytes]:
    """(path, body): a valid body with hostile values in some places, or broken as JSON, or no JSON at all."""
    path, body = rng.choice(BODIES)
    if rng.random() < 0.1:
        return path, rng.randbytes(rng.randrange(200))
    changed = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 3)):
        _put_hostile(changed, rng)
    data = json.dumps(changed).encode()
    return path, mangled(data, rng) if rng.random() < 0.3 else data


def _put_hostile(body: dict[str, Any], rng: random.Random) -> None:
    """Somewhere in the tree, or under a name that this path may not know."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in pairs:
            places.append((node, key))
            walk(value)

    walk(body)
    names = ("n", "best_of", "tools", "prompt_logprobs", "response_format", "chat_template_kwargs", "suffix", "user")
    places += [(body, name) for name in names]
    node, key = rng.choice(places)
    node[key] = copy.deepcopy(rng.choice(HOSTILE))


def generate_request(rng: random.Random) -> bytes:
    """A GenerateRequest whose fields are hostile, then mangled half of the time, or just bytes."""
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(300))
    message = inference_pb2.GenerateRequest(model=rng.choice(["toy", "", "other"]))
    match rng.randrange(4):
        case 0:
            message.tokens.ids.extend(rng.choice([0, 5, 999, 1000, 2**32 - 1]) for _ in range(rng.randrange(40)))
        case 1:
            message.text = "w3 " * rng.randrange(3)
        case 2:
            message.chat.messages.add(role=rng.choice(["user", "tool", ""]), content="w1 ")
        case _:
            pass
    sampling = message.sampling
    sampling.max_tokens = rng.choice([0, 1, 2, 3, 2**32 - 1])
    numbers = (float("nan"), float("inf"), -1.0, 0.0, 0.5, 1e30)
    for name in rng.sample(("temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"), 2):
        setattr(sampling, name, rng.choice(numbers))
    for name in rng.sample(("top_k", "min_tokens", "logprobs", "prompt_logprobs", "seed"), 2):
        setattr(sampling, name, rng.choice([0, 1, 21, 2**32 - 1]))
    if rng.random() < 0.2:
        sampling.stop.append(rng.choice(["", "x" * 300, "w1"]))
        message.request_id = rng.choice(["", "same", "x" * 200, "\n"])
    data: bytes = message.SerializeToString()
    return mangled(data, rng) if rng.random() < 0.5 else data


HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def http2_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def http2_bytes(rng: random.Random) -> bytes:
    """What follows a TCP connect to the gRPC port: frames cut off, of wrong kinds, on wrong streams, huge."""
    frames = [http2_frame(4, 0, 0, b"")]
    for _ in range(rng.randint(1, 6)):
        kind, stream = rng.randrange(12), rng.choice([0, 1, 2, 3, 2**31 - 1])
        size = rng.choice([0, 1, 5, 100, 16384])
        frames.append(http2_frame(kind, rng.randrange(256), stream, rng.randbytes(size)))
    data = b"".join(frames)
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randrange(2000))
        case 1:
            return HTTP2_PREFACE[: rng.randrange(24)]
        case 2:
            return HTTP2_PREFACE + data[: rng.randrange(len(data))]
        case _:
            return HTTP2_PREFACE + data


HTTP1_LINES: tuple[Callable[[random.Random], bytes], ...] = (
    lambda rng: b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{}",
    lambda rng: b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
    lambda rng: b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    lambda rng: b"GET /v1/models/" + b"%ff" * rng.randrange(200) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    lambda rng: b"GET /health HTTP/1.1\r\nX: " + b"a" * rng.randrange(200_000) + b"\r\n\r\n",
    lambda rng: b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * rng.randrange(3000) + b"\r\n",
    lambda rng: b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Segue-Tenant: \xff\xfe\r\nContent-Length: 2\r\n\r\n{}",
    lambda rng: rng.randbytes(rng.randrange(600)),
    lambda rng: mangled(b'POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"prompt":"w1"}', rng),
)


def http1_bytes(rng: random.Random) -> bytes:
    """What follows a TCP connect to the HTTP port."""
    return rng.choice(HTTP1_LINES)(rng)
