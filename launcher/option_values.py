"""Values that options take by name, known before anything that they choose is imported or started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.connectors.base import MOVERS
from segue.config import ClusterConfig
from segue.errors import ConfigError

AUTO = "auto"
DTYPES = (AUTO, "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = (AUTO, "cudnn", "torch", "triton")
KV_CONNECTORS = (AUTO, *sorted(MOVERS))


def check_named_values(config: ClusterConfig) -> None:
    """Raise ConfigError that names the option and the values it takes."""
    engine = config.engine
    known: Mapping[str, tuple[str, Sequence[str]]] = {
        "--dtype": (config.model.dtype, DTYPES),
        "--kv-connector": (config.scheduler.kv_connector, KV_CONNECTORS),
        "--attention-prefill": (engine.attention_prefill, ATTENTION_BACKENDS),
        "--attention-decode": (engine.attention_decode, ATTENTION_BACKENDS),
    }
    for option, (value, values) in known.items():
        if value not in values:
            raise ConfigError(f"{option} {value!r}: known: {', '.join(values)}")
