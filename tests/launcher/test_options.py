from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from launcher.options import (
    OPTION_PATHS,
    check_model_path,
    cluster_config,
    parse_bytes,
    parse_slo,
    parse_weights,
    read_config_file,
)
from segue.config import ClusterConfig
from segue.errors import ConfigError


def asked(given: dict[str, object], from_file: dict[str, object] | None = None) -> ClusterConfig:
    return cluster_config(given, from_file or {}, "test")


def test_defaults_are_one_prefill_and_one_decode_on_loopback() -> None:
    config = asked({"model": "m"})
    assert (config.prefill, config.decode, config.aggregated) == (1, 1, 0)
    assert (config.front.host, config.front.grpc_port, config.front.http_port) == ("127.0.0.1", 50051, 8000)


def test_aggregated_alone_replaces_the_pair() -> None:
    config = asked({"model": "m", "aggregated": 2})
    assert (config.prefill, config.decode, config.aggregated) == (0, 0, 2)


def test_aggregated_beside_an_asked_for_pair() -> None:
    config = asked({"model": "m", "aggregated": 1, "prefill": 2, "decode": 1})
    assert (config.prefill, config.decode, config.aggregated) == (2, 1, 1)


def test_command_line_wins_over_file_and_file_over_defaults() -> None:
    from_file = {"model": {"path": "m", "dtype": "bfloat16"}, "scheduler": {"max_num_seqs": 3, "pipeline_depth": 1}}
    config = asked({"max_num_seqs": 5, "dtype": None}, from_file)
    assert (config.scheduler.max_num_seqs, config.scheduler.pipeline_depth) == (5, 1)
    assert config.model.dtype == "bfloat16"


def test_merging_leaves_the_file_as_it_was() -> None:
    from_file: dict[str, object] = {"model": {"path": "m"}}
    asked({"dtype": "float16"}, from_file)
    assert from_file == {"model": {"path": "m"}}


def test_unknown_key_in_a_file_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="max_seqs"):
        asked({"model": "m"}, {"scheduler": {"max_seqs": 3}})


def test_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="--model"):
        asked({})


@pytest.mark.parametrize(
    ("text", "value"), [("1048576", 1 << 20), ("512MiB", 512 << 20), ("2G", 2 << 30), ("1.5gb", 3 << 29), ("7 k", 7168)]
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "two", "-1G", "1Q", "1G extra"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        parse_bytes(text)


def test_toml_and_json_files_say_the_same(tmp_path: Path) -> None:
    toml, json = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text('prefill = 2\n[model]\npath = "m"\n')
    json.write_text('{"prefill": 2, "model": {"path": "m"}}')
    assert read_config_file(toml) == read_config_file(json) == {"prefill": 2, "model": {"path": "m"}}


@pytest.mark.parametrize(("name", "text"), [("a.yaml", ""), ("a.toml", "prefill ="), ("a.json", "[1]")])
def test_unreadable_file_is_an_error_that_names_it(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=name):
        read_config_file(path)


def test_model_path_must_exist_and_look_like_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        check_model_path(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_model_path(str(tmp_path))
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ConfigError, match="neither"):
        check_model_path(str(tmp_path / "weights.bin"))
    (tmp_path / "config.json").touch()
    check_model_path(str(tmp_path))


def test_objectives_and_weights_land_in_the_front() -> None:
    given = {**parse_slo("ttft=2, tpot=0.05"), "tenant_weights": parse_weights(["gold=3", "a=b=0.5"]), "model": "m"}
    admission = cluster_config(given, {}, "test").front.admission
    assert (admission.slo_ttft_s, admission.slo_tpot_s, admission.slo_ttft_factor) == (2.0, 0.05, 3.0)
    assert admission.tenant_weights == {"gold": 3.0, "a=b": 0.5}


def test_objectives_have_units() -> None:
    assert parse_slo("ttft=2000ms,tpot=0.05s") == {"slo_ttft": 2.0, "slo_tpot": 0.05}


@pytest.mark.parametrize(
    "text",
    [
        "ttft",
        "ttft=fast",
        "latency=1",
        "tpot=-1",
        "ttft=inf",
        "ttft=nan",
        "ttft=0",
        "ttft=1,ttft=2",
        "tpot=50",
        "ttft=ms",
    ],
)
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo(text)


@pytest.mark.parametrize("pair", ["gold", "gold=much", "gold=0", "gold=-1"])
def test_what_is_no_weight_is_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match="--tenant-weight"):
        parse_weights([pair])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [({"model": "a.gguf", "grpc_port": 1}, "model"), ({"grpc_port": 1}, "grpc_port"), ({"front": {"grpc": 1}}, "grpc")],
)
@pytest.mark.parametrize("given", [{}, {"model": "m"}])
def test_what_is_wrong_in_a_file_is_not_taken_for_a_missing_option(
    given: dict[str, str], content: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        cluster_config(given, content, "cluster.toml")
    assert "cluster.toml" in str(refused.value) and "--model is needed" not in str(refused.value)


def test_the_documented_keys_are_those_of_the_options() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    for path in OPTION_PATHS.values():
        assert f"| `{'.'.join(path)}` |" in text
    example = text.partition("```toml\n")[2].partition("```")[0]
    assert cluster_config({}, tomllib.loads(example), "example").scheduler.max_num_seqs == 64
