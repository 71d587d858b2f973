"""`segue memory` as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.cli import app
from tests.engine.tiny_checkpoints import family_configs, write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory-model")
    write_checkpoint(family_configs()["llama"], folder)
    return folder


def memory(model: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["memory", "--model", str(model), *options])
    return result.exit_code, result.output


def test_it_says_what_a_cpu_instance_takes(model: Path) -> None:
    status, text = memory(model, "--device", "cpu", "--kv-pages", "100")
    assert status == 0
    assert "weights" in text and "100 pages of 16 tokens" in text
    assert "1,600 tokens fit: 12 sequences of 128" in text


def test_it_plans_for_a_gpu_that_is_not_here(model: Path) -> None:
    status, text = memory(model, "--gpu-memory", "4GiB", "--gpu-memory-utilization", "0.5", "--dtype", "bfloat16")
    assert status == 0
    assert "0.5 of 4096 MiB" in text and "graphs" in text and "pages of 64 tokens" in text


def test_it_ends_with_1_when_nothing_fits(model: Path) -> None:
    status, text = memory(model, "--gpu-memory", "1GiB", "--gpu-memory-utilization", "0.5")
    assert status == 1
    assert "0 pages" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--gpu-memory", "much"), "much"), (("--device", "cpu", "--max-model-len", "129"), "max_model_len 129")],
)
def test_mistakes_are_named(model: Path, options: tuple[str, ...], message: str) -> None:
    status, text = memory(model, *options)
    assert status == 2
    assert message in text
