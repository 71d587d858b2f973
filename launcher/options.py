"""Command line and config file to ClusterConfig: defaults < file < command line. Pure, but for reading the file."""

from __future__ import annotations

import copy
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from segue.config import ClusterConfig, decode_config
from segue.errors import ConfigError

OPTION_PATHS: dict[str, tuple[str, ...]] = {
    "model": ("model", "path"),
    "served_model_name": ("model", "name"),
    "dtype": ("model", "dtype"),
    "quantization": ("model", "quantization"),
    "kv_cache_dtype": ("engine", "kv_dtype"),
    "max_model_len": ("model", "max_model_len"),
    "device": ("engine", "device"),
    "threads": ("engine", "threads"),
    "batch_invariant": ("engine", "batch_invariant"),
    "attention_prefill": ("engine", "attention_prefill"),
    "attention_decode": ("engine", "attention_decode"),
    "block_size": ("engine", "block_size"),
    "kv_memory": ("engine", "kv_memory_bytes"),
    "kv_pages": ("engine", "pages"),
    "gpu_memory_utilization": ("engine", "gpu_memory_utilization"),
    "max_num_seqs": ("scheduler", "max_num_seqs"),
    "max_num_batched_tokens": ("scheduler", "max_num_batched_tokens"),
    "enable_prefix_caching": ("scheduler", "prefix_caching"),
    "pipeline_depth": ("scheduler", "pipeline_depth"),
    "steps_max": ("scheduler", "steps_max"),
    "kv_connector": ("scheduler", "kv_connector"),
    "host": ("front", "host"),
    "grpc_port": ("front", "grpc_port"),
    "http_port": ("front", "http_port"),
    "advertise_host": ("front", "advertise_host"),
    "queue_max": ("front", "queue_max"),
    "strict_fields": ("front", "strict_fields"),
    "slo_ttft": ("front", "admission", "slo_ttft_s"),
    "slo_ttft_factor": ("front", "admission", "slo_ttft_factor"),
    "slo_tpot": ("front", "admission", "slo_tpot_s"),
    "cost_model": ("front", "admission", "cost_model"),
    "tenant_weights": ("front", "admission", "tenant_weights"),
    "tenant_queue_max": ("front", "admission", "tenant_queue_max"),
    "redis_url": ("front", "directory", "redis_url"),
    "tenant_requests": ("front", "tenants", "requests_max"),
    "tenant_tokens": ("front", "tenants", "tokens_per_minute"),
    "record": ("front", "record"),
    "log_level": ("front", "log_level"),
    "conductors": ("conductors",),
    "prefill": ("prefill",),
    "decode": ("decode",),
    "aggregated": ("aggregated",),
    "local_processes": ("local_processes",),
}
"""Where each option of `segue up` lands in ClusterConfig."""

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """`2GiB`, `512M`, `1.5g`, `1048576`; units are powers of 1,024."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--kv-memory: {text!r} is not a size such as 512MiB or 2GiB")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


SLO_KEYS = ("ttft", "tpot", "ttft_factor")
SLO_UNIT_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
SLO_S_MAX = {"ttft": 600.0, "tpot": 10.0}
"""More is no objective but milliseconds without their unit."""

WEIGHT_MIN = 1e-3
"""A tenant of weight 0 would never be served."""


def parse_slo(text: str) -> dict[str, float]:
    """`ttft=2,tpot=50ms`, seconds without a unit; `ttft_factor=0` makes TTFT strict. The result names options."""
    given: dict[str, float] = {}
    for part in (part.strip() for part in text.split(",")):
        name, equals, value = part.partition("=")
        if name not in SLO_KEYS or not equals:
            raise ConfigError(f"--slo: {part!r} is not NAME=VALUE with NAME one of {', '.join(SLO_KEYS)}")
        if f"slo_{name}" in given:
            raise ConfigError(f"--slo: {name} is given twice")
        given[f"slo_{name}"] = _number("--slo", part, value, least=0.0) if name == "ttft_factor" else _bound_s(part)
    return given


def _bound_s(part: str) -> float:
    name, _, value = part.partition("=")
    unit = value.lstrip("0123456789.")
    number = value.removesuffix(unit) if unit in SLO_UNIT_S else value
    seconds = _number("--slo", part, number, least=0.0) * SLO_UNIT_S.get(unit, 1.0)
    if not 0 < seconds <= SLO_S_MAX[name]:
        raise ConfigError(
            f"--slo: {part!r} is {seconds:g} s: more than 0 and at most {SLO_S_MAX[name]:g} s; 50ms is 0.05"
        )
    return seconds


def parse_weights(pairs: Sequence[str]) -> dict[str, float]:
    """`gold=3` for each tenant."""
    weights: dict[str, float] = {}
    for pair in pairs:
        tenant, equals, value = pair.rpartition("=")
        if not equals:
            raise ConfigError(f"--tenant-weight: {pair!r} is not TENANT=WEIGHT")
        weights[tenant] = _number("--tenant-weight", pair, value, least=WEIGHT_MIN)
    return weights


def _number(option: str, given: str, text: str, *, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        raise ConfigError(f"{option}: {text!r} of {given!r} is not a number of at least {least:g}")
    return value


def read_config_file(path: Path) -> dict[str, Any]:
    """A .toml or .json file of ClusterConfig's fields."""
    readers = {".toml": tomllib.loads, ".json": json.loads}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(f"--config: {path} must end in {' or '.join(readers)}")
    try:
        content = reader(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config: {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} must hold a table of settings")
    return content


def cluster_config(given: Mapping[str, Any], from_file: Mapping[str, Any], source: str) -> ClusterConfig:
    """Merge options that were given (None: not given) over the file's settings; raise ConfigError on unknown keys.

    Asking for aggregated instances alone means only those: the default pair is for who asks for nothing.
    """
    merged: dict[str, Any] = copy.deepcopy(dict(from_file))
    _check_file(merged, source)
    for option, value in given.items():
        if value is not None:
            _set(merged, OPTION_PATHS[option], value)
    if merged.get("aggregated") and "prefill" not in merged and "decode" not in merged:
        merged |= {"prefill": 0, "decode": 0}
    if "path" not in merged.get("model", {}):
        raise ConfigError("--model is needed: a folder with config.json and safetensors, or a GGUF file")
    return decode_config(merged, ClusterConfig, source)


def _check_file(content: Mapping[str, Any], source: str) -> None:
    """By itself, so that what is wrong in it is not taken for a missing option; the model may come from an option."""
    model = content.get("model", {})
    if isinstance(model, Mapping):
        model = {"path": "", **model}
    decode_config({**content, "model": model}, ClusterConfig, source)


def _set(settings: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        settings = settings.setdefault(key, {})
    settings[path[-1]] = value


def check_model_path(path: str) -> None:
    """Fail before anything starts when the model cannot be there."""
    model = Path(path)
    if not model.exists():
        raise ConfigError(f"--model: {path} does not exist")
    if model.is_dir() and not (model / "config.json").exists():
        raise ConfigError(f"--model: {path} holds no config.json; name a model folder or a .gguf file")
    if model.is_file() and model.suffix != ".gguf":
        raise ConfigError(f"--model: {path} is neither a folder nor a .gguf file")
