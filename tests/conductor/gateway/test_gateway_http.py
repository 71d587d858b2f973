"""The HTTP surface by hand: every refusal by name, service endpoints, and what goes over the wire."""

import json
import shutil
import subprocess
from collections.abc import Awaitable, Callable

import anyio
import httpx
import pytest
from gateway_front import Front, saying, tokens_of
from prometheus_client.parser import text_string_to_metric_families

from segue import limits

Start = Callable[..., Awaitable[Front]]
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "toy", "prompt": "hi"}


async def post(front: Front, path: str, body: object) -> httpx.Response:
    async with httpx.AsyncClient(base_url=front.http_url) as client:
        if isinstance(body, bytes):
            return await client.post(path, content=body)
        return await client.post(path, json=body)


async def get(front: Front, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=front.http_url) as client:
        return await client.get(path)


INVALID_CHAT = [
    ("nan", b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}', 400, "temperature"),
    ("infinity", b'{"messages":[{"role":"user","content":"x"}],"logit_bias":{"3":Infinity}}', 400, "logit_bias.3"),
    ("overflow", b'{"messages":[{"role":"user","content":"x"}],"top_p":1e999}', 400, "top_p"),
    ("bad_utf8", b'{"messages":[{"role":"user","content":"\xff"}]}', 400, "body"),
    ("surrogate", b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400, None),
    ("not_json", b"{", 400, "body"),
    ("array", b"[]", 400, "body"),
    ("empty", b"", 400, "body"),
    ("deep", b"[" * 100_000, 400, "body"),
    ("no_messages", {"model": "toy"}, 400, "messages"),
    ("messages_empty", {**CHAT, "messages": []}, 400, "messages"),
    ("messages_type", {**CHAT, "messages": "x"}, 400, "messages"),
    ("role", {**CHAT, "messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
    (
        "image",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content[0].type",
    ),
    ("temperature_type", {**CHAT, "temperature": "hot"}, 400, "temperature"),
    ("temperature_bool", {**CHAT, "temperature": True}, 400, "temperature"),
    ("temperature_negative", {**CHAT, "temperature": -1}, 400, "temperature"),
    ("top_p", {**CHAT, "top_p": 0}, 400, "top_p"),
    ("max_tokens_0", {**CHAT, "max_tokens": 0}, 400, "max_tokens"),
    ("max_completion_tokens_0", {**CHAT, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ("max_twice", {**CHAT, "max_tokens": 1, "max_completion_tokens": 2}, 400, "max_completion_tokens"),
    ("max_tokens_huge", {**CHAT, "max_tokens": 10**30}, 400, "max_tokens"),
    ("max_tokens_float", {**CHAT, "max_tokens": 1.5}, 400, "max_tokens"),
    ("min_over_max", {**CHAT, "max_tokens": 1, "min_tokens": 2}, 400, "min_tokens"),
    ("n_0", {**CHAT, "n": 0}, 400, "n"),
    ("n_17", {**CHAT, "n": 17}, 400, "n"),
    ("bias_key", {**CHAT, "logit_bias": {"word": 1}}, 400, "logit_bias"),
    ("bias_id", {**CHAT, "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ("bias_value", {**CHAT, "logit_bias": {"1": 1000}}, 400, "logit_bias"),
    ("stop_empty", {**CHAT, "stop": ""}, 400, "stop[0]"),
    ("stop_type", {**CHAT, "stop": [1]}, 400, "stop[0]"),
    ("top_logprobs_alone", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs"),
    ("top_logprobs_21", {**CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ("stream_options_alone", {**CHAT, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("echo", {**CHAT, "echo": True}, 400, "echo"),
    ("best_of", {**CHAT, "best_of": 2}, 400, "best_of"),
    ("prompt_logprobs_stream", {**CHAT, "prompt_logprobs": 0, "stream": True}, 400, "prompt_logprobs"),
    ("tools", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools"),
    ("response_format", {**CHAT, "response_format": {"type": "json_object"}}, 400, "response_format"),
    ("modalities", {**CHAT, "modalities": ["text", "audio"]}, 400, "modalities"),
    ("audio", {**CHAT, "audio": {"voice": "x"}}, 400, "audio"),
    ("template", {**CHAT, "chat_template": "x"}, 400, "chat_template"),
    ("too_long", {**CHAT, "messages": [{"role": "user", "content": "a" * 300}]}, 400, "messages"),
    ("far_too_long", {**CHAT, "messages": [{"role": "user", "content": "a" * 99_999}]}, 400, "messages"),
    ("unknown_model", {**CHAT, "model": "gpt"}, 404, "model"),
    ("expected_model", {**CHAT, "model": "later"}, 503, "model"),
]

INVALID_TEXT = [
    ("no_prompt", {"model": "toy"}, 400, "prompt"),
    ("prompt_empty", {**TEXT, "prompt": ""}, 400, "prompt"),
    ("prompt_list_empty", {**TEXT, "prompt": []}, 400, "prompt"),
    ("prompt_one_empty", {**TEXT, "prompt": ["a", ""]}, 400, "prompt[1]"),
    ("prompt_ids_empty", {**TEXT, "prompt": [[1], []]}, 400, "prompt[1]"),
    ("prompt_id_range", {**TEXT, "prompt": [[1], [99_999]]}, 400, "prompt[1]"),
    ("prompt_id_negative", {**TEXT, "prompt": [-1]}, 400, "prompt"),
    ("prompt_id_huge", {**TEXT, "prompt": [10**30]}, 400, "prompt"),
    ("prompt_type", {**TEXT, "prompt": {"a": 1}}, 400, "prompt"),
    ("prompt_mixed", {**TEXT, "prompt": [1, "a"]}, 400, "prompt[1]"),
    ("prompts_many", {**TEXT, "prompt": ["a"] * 129}, 400, "prompt"),
    ("max_tokens_0", {**TEXT, "max_tokens": 0}, 400, "max_tokens"),
    ("max_tokens_below_0", {**TEXT, "max_tokens": -1, "echo": True}, 400, "max_tokens"),
    ("echo_logprobs", {**TEXT, "echo": True, "logprobs": 21}, 400, "logprobs"),
    ("suffix", {**TEXT, "suffix": "x"}, 400, "suffix"),
    ("best_of_below_n", {**TEXT, "n": 3, "best_of": 2}, 400, "best_of"),
    ("best_of_17", {**TEXT, "best_of": 17}, 400, "best_of"),
    ("best_of_stream", {**TEXT, "best_of": 2, "stream": True}, 400, "best_of"),
    ("sequences", {**TEXT, "prompt": ["a"] * 17, "n": 16}, 400, "n"),
    ("sequences_best_of", {**TEXT, "prompt": ["a"] * 17, "best_of": 16}, 400, "best_of"),
    ("prompt_logprobs_21", {**TEXT, "prompt_logprobs": 21}, 400, "prompt_logprobs"),
    ("prompt_logprobs_all", {**TEXT, "prompt_logprobs": -1}, 400, "prompt_logprobs"),
    ("prompt_logprobs_stream", {**TEXT, "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    ("logprobs", {**TEXT, "logprobs": 21}, 400, "logprobs"),
]


async def check_refusal(front: Front, path: str, body: object, status: int, param: str | None) -> None:
    answer = await post(front, path, body)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert set(error) >= {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param, error
    assert not front.conductor.submitted


@pytest.mark.parametrize(("body", "status", "param"), [r[1:] for r in INVALID_CHAT], ids=[r[0] for r in INVALID_CHAT])
async def test_invalid_chat_requests(start: Start, body: object, status: int, param: str | None) -> None:
    await check_refusal(await start(), "/v1/chat/completions", body, status, param)


@pytest.mark.parametrize(("body", "status", "param"), [r[1:] for r in INVALID_TEXT], ids=[r[0] for r in INVALID_TEXT])
async def test_invalid_completion_requests(start: Start, body: object, status: int, param: str | None) -> None:
    await check_refusal(await start(), "/v1/completions", body, status, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "none", "logit_bias": None, "stop": None, "n": None, "seed": None},
        {"a_field_of_the_future": 1},
    ],
)
async def test_inert_empty_and_unknown_fields_are_accepted(start: Start, fields: dict[str, object]) -> None:
    answer = await post(await start(), "/v1/chat/completions", {**CHAT, **fields})
    assert answer.status_code == 200


async def test_strict_fields_refuse_unknown_ones_only(start: Start) -> None:
    front = await start(strict_fields=True)
    assert (await post(front, "/v1/chat/completions", {**CHAT, "user": "u"})).status_code == 200
    answer = await post(front, "/v1/chat/completions", {**CHAT, "temperatur": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperatur")


async def test_a_body_over_the_limit_is_413(start: Start) -> None:
    answer = await post(await start(), "/v1/completions", b" " * (limits.BODY_BYTES_MAX + 1))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_an_unknown_path_gets_an_error_object(start: Start) -> None:
    answer = await get(await start(), "/nowhere")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


async def test_a_method_that_a_path_does_not_take_is_told_those_that_it_does(start: Start) -> None:
    answer = await get(await start(), "/v1/completions")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], answer.headers["allow"]) == (405, "method_not_allowed", "POST")
    assert error["message"] == "GET /v1/completions: Method Not Allowed; it takes POST"


async def test_a_stream_on_the_wire_is_events_and_a_done_mark(start: Start) -> None:
    answer = await post(await start(saying("hello")), "/v1/chat/completions", {**CHAT, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first = json.loads(events[0].removeprefix("data: "))
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]


async def test_with_include_usage_every_chunk_has_the_key_and_the_last_one_the_counts(start: Start) -> None:
    body = {**TEXT, "stream": True, "stream_options": {"include_usage": True}}
    answer = await post(await start(saying("hello")), "/v1/completions", body)
    chunks = [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n")[:-2]]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["prompt_tokens"]) == ([], 2)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_curl_can_talk_to_it(start: Start) -> None:
    front = await start(saying("hello"))
    command = ["curl", "-sN", f"{front.http_url}/v1/completions", "-d", json.dumps({**TEXT, "stream": True})]
    answer = await anyio.to_thread.run_sync(
        lambda: subprocess.run(command, capture_output=True, check=True, timeout=60)
    )
    assert b'"text":"hello"' in answer.stdout and answer.stdout.endswith(b"data: [DONE]\n\n")


async def test_a_body_that_is_no_object_is_called_by_its_json_name(start: Start) -> None:
    front = await start()
    for body, name in (
        (b"null", "null"),
        (b"[]", "array"),
        (b"1.5", "number"),
        (b"true", "boolean"),
        (b'"x"', "string"),
    ):
        answer = await post(front, "/v1/completions", body)
        assert answer.json()["error"]["message"] == f"body: is a JSON {name}, must be an object"


async def test_health_ready_and_version(start: Start) -> None:
    front = await start()
    assert (await get(front, "/health")).status_code == 200
    assert (await get(front, "/ready")).status_code == 200
    assert (await get(front, "/version")).json()["version"]


async def test_it_is_healthy_but_not_ready_without_a_usable_pair(start: Start) -> None:
    front = await start()
    front.conductor.served.clear()
    assert (await get(front, "/health")).status_code == 200
    assert (await get(front, "/ready")).status_code == 503
    assert (await post(front, "/v1/completions", TEXT)).status_code == 503
    assert (await post(front, "/v1/completions", {"prompt": "x"})).status_code == 503


async def test_a_probe_of_readiness_is_not_counted_as_a_failed_request(start: Start) -> None:
    front = await start()
    front.conductor.served.clear()
    assert (await get(front, "/ready")).json()["error"]["code"] == "unavailable"
    assert 'request_errors_total{code="unavailable"' not in (await get(front, "/metrics")).text


async def test_a_models_path_without_a_name_is_not_found(start: Start) -> None:
    front = await start()
    answer = await get(front, "/v1/models/")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_tokenize_and_detokenize_are_inverse(start: Start) -> None:
    front = await start()
    tokens = (await post(front, "/tokenize", {"prompt": "hello 漢字"})).json()
    ids = tokens_of("hello 漢字")
    assert tokens == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}
    assert (await post(front, "/detokenize", {"tokens": tokens["tokens"]})).json() == {"prompt": "hello 漢字"}


async def test_tokenize_renders_messages(start: Start) -> None:
    answer = await post(await start(), "/tokenize", {"messages": CHAT["messages"]})
    assert answer.json()["tokens"] == tokens_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_metrics_count_tokens_hits_ends_and_errors(start: Start) -> None:
    front = await start(saying("hello world", tokens_cached=1))
    await post(front, "/v1/completions", TEXT)
    await post(front, "/v1/completions", {**TEXT, "temperature": -1})
    text = (await get(front, "/metrics")).text
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    generated = len(tokens_of("hello world")) + 1
    assert samples["segue:generation_tokens_total", "toy"] == generated
    assert samples["segue:prompt_tokens_total", "toy"] == 2
    assert samples["segue:prefix_cache_hits_total", "toy"] == 1
    assert samples["segue:prefix_cache_queries_total", "toy"] == 2
    assert samples["segue:request_success_total", "stop", "toy"] == 1
    assert samples["segue:request_errors_total", "", "invalid_value"] == 1
    assert samples["segue:time_to_first_token_seconds_count", "toy"] == 1
    assert samples["segue:inter_token_latency_seconds_count", "toy"] == generated - 1
    assert samples["segue:e2e_request_latency_seconds_count", "toy"] == 1
    assert samples["segue:num_requests_running",] == 0
    assert samples["segue:kv_pages", "d0", "decode", "free"] == 60
    assert samples["segue:instances", "decode", "ready"] == 1
    assert samples["segue:instances", "decode", "draining"] == 0
