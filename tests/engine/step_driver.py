"""Drives a DecoderModel position by position, so that every position's logits can be compared."""

import torch

from engine.engine import DTYPES, ModelInfo, build_model, read_model
from engine.model import DecoderModel
from engine.row_state import RowState
from engine.step_batch import build_step
from segue.config import EngineConfig, ModelConfig
from segue.plan import Chunk

torch.set_num_threads(1)


class StepDriver:
    """Rows of known tokens over a private pool; every row owns pages `row * blocks .. `, in reverse order."""

    def __init__(self, info: ModelInfo, model: DecoderModel, rows_max: int = 4) -> None:
        self.info, self.model = info, model
        positions_max = model.ropes[0].shape[0]
        self.state = RowState(rows_max, positions_max, info.layout.block_size, info.device)
        pages = rows_max * self.state.blocks_max
        shape = (pages, *info.layout.page_shape)
        self.kv_pages = torch.full(shape, float("nan"), dtype=DTYPES[info.layout.dtype], device=info.device)

    def start(self, row: int, tokens: list[int]) -> None:
        blocks = self.state.blocks_max
        self.state.start(row, 100 + row, tokens, list(reversed(range(row * blocks, (row + 1) * blocks))))

    @torch.inference_mode()
    def logits(self, chunks: list[Chunk] = (), decodes: list[int] = ()) -> torch.Tensor:
        """Logits of every token of the step, prefill tokens first."""
        step = build_step(self.state, chunks, decodes).model_input
        return self.model.logits(self.model.hidden_states(step, self.kv_pages))


def driver_for(path: str, block_size: int = 8, **engine: object) -> StepDriver:
    config = EngineConfig(device="cpu", block_size=block_size, pages=1, **engine)
    info = read_model(ModelConfig(path=path), config)
    return StepDriver(info, build_model(info, config, positions_max=min(128, info.card.max_model_len)))
