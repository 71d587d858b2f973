"""Chat templates, rendered in a sandbox: they come with model files, which nobody has read.

Settings and extra names are those that `transformers` documents for `apply_chat_template`: trimmed blocks, `tojson`
that keeps non-ASCII text, `raise_exception`, `strftime_now`, loop controls and `generation` blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from segue.errors import ConfigError, InvalidField


class TemplateRefusal(jinja2.TemplateError):
    """Raised by the template itself: `raise_exception("...")`."""


class GenerationBlocks(Extension):
    """`{% generation %} ... {% endgeneration %}` marks trained text; rendering keeps the body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class ChatTemplate:
    """`now` is called for `strftime_now` only."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Raise InvalidField("messages") for a conversation that the template refuses or cannot express."""
        names: dict[str, Any] = {**self._special_tokens, **(variables or {})}
        names.update(messages=messages, add_generation_prompt=add_generation_prompt)
        try:
            return self._template.render(names)
        except TemplateRefusal as error:
            raise InvalidField("messages", f"the chat template says: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidField("messages", f"the chat template cannot render them: {error}") from error
