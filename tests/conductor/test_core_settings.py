"""From options to the settings of a core; a cost model that cannot be used is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from conductor.core.settings import CoreSettings, make_core
from conductor.core_settings import core_settings
from segue.config import AdmissionConfig, FrontConfig
from segue.cost_model import CostModel, DecodeCost, PrefillCost
from segue.errors import ConfigError

COST = CostModel(
    prefill=PrefillCost(base_us=1.0, token_us=2.0, pair_us=3.0),
    decode=DecodeCost(base_us=4.0, row_us=5.0, kv_token_us=6.0),
    kv_token_bytes=7,
)


def admission(**changes: object) -> CoreSettings:
    return core_settings(FrontConfig(admission=AdmissionConfig(**changes)))  # type: ignore[arg-type]


def test_without_objectives_nothing_is_rejected_by_prediction() -> None:
    assert admission().objectives is None


def test_one_objective_leaves_the_other_open() -> None:
    objectives = admission(slo_tpot_s=0.05).objectives
    assert objectives is not None
    assert (objectives.ttft_us, objectives.tpot_us) == (float("inf"), 50_000.0)


def test_objectives_are_the_targets_that_losses_are_weighed_by() -> None:
    targets = make_core(admission(slo_ttft_s=4.0, slo_ttft_factor=2.0)).beliefs.targets
    assert (targets.ttft_us, targets.ttft_factor, targets.tpot_us) == (4e6, 2.0, 50_000.0)


def test_a_cost_model_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(msgspec.json.encode(COST))
    assert admission(cost_model=str(path)).cost == COST


@pytest.mark.parametrize(("content", "complaint"), [(None, "cannot read"), (b"{}", "prefill"), (b"x", "malformed")])
def test_a_cost_model_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "cost.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        admission(cost_model=str(path))
    assert str(caught.value).startswith("--cost-model")
    assert "cost.json" in str(caught.value)
