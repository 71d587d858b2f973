"""Ranks of a mesh, run as threads over a summing group, give the logits of one rank."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from step_driver import StepDriver
from tiny_checkpoints import family_configs, reference_logits, relative_error, write_checkpoint

from engine.engine import build_model, read_model
from engine.parallel import Mesh
from segue.config import EngineConfig, ModelConfig
from segue.errors import ConfigError
from segue.plan import Chunk

TOKENS = list(range(30, 61))
CONFIG = EngineConfig(device="cpu", block_size=8, pages=1)


class SummingGroup:
    """Collectives of threads: every member leaves with the sum of all members' tensors."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._parts: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._parts.append(tensor.clone())
        self._barrier.wait()
        tensor.copy_(torch.stack(self._parts).sum(dim=0))
        if self._barrier.wait() == 0:
            self._parts.clear()
        self._barrier.wait()
        return tensor


@pytest.mark.parametrize(
    "family,size,heads", [("llama_tied_biased", 2, {}), ("gemma3", 2, {}), ("qwen2", 4, {"num_attention_heads": 8})]
)
def test_shards_add_up_to_the_whole_model(tmp_path, family, size, heads):
    config = family_configs()[family]
    for key, value in heads.items():
        setattr(config, key, value)
    if family == "qwen2":
        config.head_dim, config.hidden_size = 8, 64
    reference = write_checkpoint(config, tmp_path)
    group = SummingGroup(size)

    def rank_logits(rank: int) -> torch.Tensor:
        mesh = Mesh(rank, size)
        info = read_model(ModelConfig(path=str(tmp_path)), CONFIG, mesh=mesh)
        driver = StepDriver(info, build_model(info, CONFIG, positions_max=128, mesh=mesh, collectives=group))
        driver.start(0, TOKENS)
        driver.logits([Chunk(0, 0, 20, False)])
        return driver.logits([Chunk(0, 20, len(TOKENS) - 20, False)])

    with ThreadPoolExecutor(size) as pool:
        by_rank = list(pool.map(rank_logits, range(size)))
    expected = reference_logits(reference, TOKENS)[20:]
    assert all(relative_error(logits, expected) <= 1e-4 for logits in by_rank)


def test_mesh_that_does_not_divide_the_heads_is_refused(tmp_path):
    write_checkpoint(family_configs()["llama"], tmp_path)
    with pytest.raises(ConfigError, match="6 heads"):
        read_model(ModelConfig(path=str(tmp_path)), CONFIG, mesh=Mesh(0, 4))
