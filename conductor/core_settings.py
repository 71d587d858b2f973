"""From the front's configuration to the settings of its Conductor core; reads the cost model's file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from conductor.core.admission import Objectives
from conductor.core.settings import CoreSettings
from segue.config import AdmissionConfig, FrontConfig
from segue.cost_model import CostModel
from segue.errors import ConfigError
from segue.limits import QUEUED_REQUESTS_MAX


def core_settings(config: FrontConfig) -> CoreSettings:
    """Raises ConfigError that names the option."""
    admission = config.admission
    return CoreSettings(
        models_known=config.model_names,
        queue_max=config.queue_max or QUEUED_REQUESTS_MAX,
        objectives=_objectives(admission),
        cost=_cost_model(admission.cost_model),
        tenant_weights=admission.tenant_weights,
        tenant_queue_max=admission.tenant_queue_max,
    )


def _objectives(admission: AdmissionConfig) -> Objectives | None:
    if not admission.slo_ttft_s and not admission.slo_tpot_s:
        return None
    return Objectives(
        ttft_us=admission.slo_ttft_s * 1e6 or float("inf"),
        ttft_factor=admission.slo_ttft_factor,
        tpot_us=admission.slo_tpot_s * 1e6 or float("inf"),
    )


def _cost_model(path: str) -> CostModel | None:
    if not path:
        return None
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=CostModel)
    except OSError as error:
        raise ConfigError(f"--cost-model: cannot read {path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--cost-model: {path}: {error}") from error
