"""Names that no process needs to start for to be told wrong."""

from __future__ import annotations

import msgspec
import pytest

from engine.attention.registry import BACKENDS
from engine.engine import DTYPES as ENGINE_DTYPES
from launcher.cluster_plan import check_cluster
from launcher.option_values import ATTENTION_BACKENDS, DTYPES
from segue.config import ClusterConfig, EngineConfig, ModelConfig, SchedulerConfig
from segue.errors import ConfigError

ASKED = ClusterConfig(model=ModelConfig(path="/models/toy"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": ModelConfig(path="/models/toy", dtype="int3")},
            "--dtype 'int3': known: auto, float32, bfloat16, float16",
        ),
        ({"scheduler": SchedulerConfig(kv_connector="foo")}, "--kv-connector 'foo': known: auto, "),
        (
            {"engine": EngineConfig(attention_prefill="flash")},
            "--attention-prefill 'flash': known: auto, cudnn, torch, triton",
        ),
        ({"engine": EngineConfig(attention_decode="flash")}, "--attention-decode 'flash': known: auto, "),
    ],
)
def test_unknown_name_is_refused_with_the_known_ones(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_cluster(msgspec.structs.replace(ASKED, **changes))
    assert str(refused.value).startswith(message)


def test_known_names_are_those_of_the_engine() -> None:
    assert set(DTYPES) == {"auto", *ENGINE_DTYPES}
    assert set(ATTENTION_BACKENDS) == {"auto", *BACKENDS}
