"""Prompts of OpenAI's API: chat messages for the template, and the four shapes of `prompt`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from segue import limits
from segue.errors import InvalidField

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""As sent -> as the template knows it."""

MESSAGES_MAX = 4096
"""Turns of one conversation: templates loop over them in Python."""

REFUSED_IN_MESSAGE = ("tool_calls", "tool_call_id", "function_call", "audio", "refusal")


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Role, content and name of each message; text parts are concatenated. Raises InvalidField."""
    if not messages:
        raise InvalidField("messages", "is empty; at least 1 message is needed")
    if len(messages) > MESSAGES_MAX:
        raise InvalidField("messages", f"has {len(messages)} entries, at most {MESSAGES_MAX} are allowed")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: dict[str, Any], path: str) -> dict[str, str]:
    for name in REFUSED_IN_MESSAGE:
        if message.get(name):
            raise InvalidField(f"{path}.{name}", "is not supported here", code="unsupported_parameter")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidField(f"{path}.role", f"is {role!r}, must be one of {', '.join(ROLES)}")
    result = {"role": ROLES[role], "content": _content(message.get("content"), f"{path}.content")}
    author = message.get("name")
    if author is not None:
        if not isinstance(author, str):
            raise InvalidField(f"{path}.name", "must be a string")
        result["name"] = author
    return result


def _content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidField(path, "must be a string or a list of text parts")
    return "".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise InvalidField(path, "must be an object with a type")
    if part.get("type") != "text":
        message = f"is {part.get('type')!r}; only text parts are supported here"
        raise InvalidField(f"{path}.type", message, code="unsupported_content_type")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidField(f"{path}.text", "must be a string")
    return text


def prompt_list(prompt: Any) -> list[tuple[str, str | list[int]]]:
    """(name for errors, text or token ids) of each prompt: a string, strings, token ids, or lists of token ids."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_id(prompt[0])):
        return [("prompt", _one(prompt, "prompt"))]
    if not isinstance(prompt, list):
        raise InvalidField("prompt", "must be a string, a list of strings, token ids, or lists of token ids")
    if not prompt:
        raise InvalidField("prompt", "is empty; at least 1 token is needed", code="prompt_empty")
    if len(prompt) > limits.PROMPTS_PER_CALL_MAX:
        limit = limits.PROMPTS_PER_CALL_MAX
        raise InvalidField("prompt", f"has {len(prompt)} entries, at most {limit} prompts are allowed")
    return [(name, _one(entry, name)) for name, entry in ((f"prompt[{i}]", entry) for i, entry in enumerate(prompt))]


def _one(entry: Any, name: str) -> str | list[int]:
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, list):
        raise InvalidField(name, "must be a string or a list of token ids")
    for index, token_id in enumerate(entry):
        if not _is_id(token_id):
            raise InvalidField(f"{name}[{index}]", "must be a token id (an integer)")
    return entry


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
