"""Typed look-ups in a checkpoint's own metadata; a missing or mistyped key is a ConfigError that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from segue.errors import ConfigError


class Settings:
    """A read-only mapping with typed getters. `source` is the file named in errors."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value; `default` when the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def _wrong(self, key: str, wanted: str, value: Any) -> ConfigError:
        if value is None:
            return ConfigError(f"{self.source}: {key} is missing")
        return ConfigError(f"{self.source}: {key} must be {wanted}, not {value!r}")
