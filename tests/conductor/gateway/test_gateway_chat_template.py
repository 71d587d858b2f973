from datetime import UTC, datetime

import pytest

from conductor.gateway.chat_template import ChatTemplate
from conductor.gateway.openai_prompts import prompt_list, template_messages
from conductor.gateway.testing import CHATML, toy_card
from conductor.gateway.text import TextCodec
from segue.errors import ConfigError, InvalidField

HELLO = [{"role": "user", "content": "hello"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, lambda: datetime(2026, 3, 4, tzinfo=UTC))


def test_chatml_is_rendered_with_trimmed_blocks_and_a_generation_prompt() -> None:
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert template(CHATML).render(HELLO) == expected


def test_the_generation_prompt_can_be_left_out() -> None:
    assert template(CHATML).render(HELLO, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


def test_the_templates_own_refusal_is_told_to_the_client() -> None:
    with pytest.raises(InvalidField, match="roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").render(HELLO)


def test_tojson_keeps_text_readable() -> None:
    assert template("{{ messages[0] | tojson }}").render([{"role": "user", "content": "é<"}]) == (
        '{"role": "user", "content": "é<"}'
    )


def test_the_date_comes_from_the_clock_that_was_handed_in() -> None:
    assert template("{{ strftime_now('%d %b %Y') }}").render(HELLO) == "04 Mar 2026"


def test_special_tokens_and_extra_variables_are_visible() -> None:
    assert template("{{ bos_token }}{{ thinking }}").render(HELLO, variables={"thinking": True}) == "<s>True"


def test_extra_variables_cannot_replace_the_messages() -> None:
    assert template("{{ messages[0].content }}").render(HELLO, variables={"messages": []}) == "hello"


def test_generation_blocks_are_rendered_as_they_are() -> None:
    assert template("a{% generation %}b{% endgeneration %}c").render(HELLO) == "abc"


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].missing.deeper }}", "{{ 1/0 }}"],
)
def test_what_the_sandbox_or_the_template_cannot_do_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidField, match="messages: the chat template"):
        template(source).render(HELLO)


def test_a_template_that_does_not_parse_is_the_operators_error() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        template("{% if %}")


def test_text_parts_are_concatenated() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    assert template_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "hello"}]


def test_a_developer_message_is_the_templates_system_message() -> None:
    assert template_messages([{"role": "developer", "content": "x"}])[0]["role"] == "system"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "name": 1}, "messages[0].name"),
    ],
)
def test_a_message_that_cannot_be_served_is_named_by_path(message: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        template_messages([message])
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("prompt", "shapes"),
    [
        ("text", [("prompt", "text")]),
        ([1, 2], [("prompt", [1, 2])]),
        (["a", "b"], [("prompt[0]", "a"), ("prompt[1]", "b")]),
        ([[1], [2, 3]], [("prompt[0]", [1]), ("prompt[1]", [2, 3])]),
    ],
)
def test_the_four_shapes_of_a_prompt(prompt: object, shapes: list[tuple[str, object]]) -> None:
    assert prompt_list(prompt) == shapes


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([], "prompt"),
        (3, "prompt"),
        ([1, "a"], "prompt[1]"),
        ([["a"]], "prompt[0][0]"),
        (["a"] * 129, "prompt"),
        ([True], "prompt[0]"),
    ],
)
def test_other_shapes_are_refused_by_name(prompt: object, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        prompt_list(prompt)
    assert caught.value.field == field


def test_bos_ids_precede_plain_text_and_chats_whose_template_does_not_write_them() -> None:
    card = toy_card()
    bos = TextCodec(card).encode_now("<|im_start|>", add_bos=False)
    codec = TextCodec(type(card)(**{**{f: getattr(card, f) for f in card.__struct_fields__}, "bos_ids": tuple(bos)}))
    assert codec.encode_now("hello")[: len(bos)] == bos
    assert codec.encode_now("hello", add_bos=False)[: len(bos)] != bos


def test_text_of_lone_surrogates_is_refused() -> None:
    with pytest.raises(InvalidField, match="surrogates"):
        TextCodec(toy_card()).encode_now("\ud800")


def test_a_card_with_a_broken_tokenizer_is_refused_when_it_is_loaded() -> None:
    card = toy_card()
    broken = type(card)(**{**{f: getattr(card, f) for f in card.__struct_fields__}, "tokenizer_json": "{}"})
    with pytest.raises(ConfigError, match="tokenizer"):
        TextCodec(broken)
