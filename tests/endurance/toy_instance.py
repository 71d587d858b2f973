"""An instance on the toy engine, in any role: `python -m toy_instance`, config on stdin as for the real ones.

The card carries a tokenizer with one word per token, so that a real gateway serves it, and a step takes a while, so
that requests are in the middle of something when a test strikes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from functools import cache
from pathlib import Path

import msgspec

import decode_worker.app
import prefill_worker.app
from segue.config import WorkerConfig
from segue.ids import InstanceRef
from segue.kv_layout import KvLayout
from segue.manifest import Role
from segue.model_card import ModelCard
from segue.plan import BatchPlan, PlanResult
from worker_runtime.engine_loading import LoadedEngine, page_memory
from worker_runtime.instance import OnReady
from worker_runtime.process import main
from worker_runtime.toy_engine import VOCAB_SIZE, ToyEngine, toy_layout

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

STEP_MS_VARIABLE = "TOY_STEP_MS"
FAIL_FILE_VARIABLE = "TOY_FAIL_FILE"
"""While the file that it names exists, an instance whose name stands in it ends as soon as it has started."""

HANG_FILE_VARIABLE = "TOY_HANG_FILE"
"""An instance whose process id stands in the file that it names never ends its next step."""


@cache
def word_tokenizer() -> str:
    """A `tokenizer.json` whose token 17 is the word "w17 "."""
    vocab = {f"w{index} ": index for index in range(VOCAB_SIZE)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0 "}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "Fuse"}, **parts})


class PacedEngine:
    """A toy engine whose step lasts at least `step_s`."""

    def __init__(self, engine: ToyEngine, step_s: float) -> None:
        self._engine = engine
        self._step_s = step_s
        self.card: ModelCard = msgspec.structs.replace(
            engine.card, tokenizer_json=word_tokenizer(), chat_template=TEMPLATE, digest="toy-words"
        )
        self.layout: KvLayout = engine.layout
        self.kv_root: bytes = engine.kv_root
        self.numerics: str = engine.numerics
        self.pages_total: int = engine.pages_total

    def launch(self, plan: BatchPlan) -> None:
        self._engine.launch(plan)

    def collect(self) -> PlanResult:
        time.sleep(self._step_s)
        while told(HANG_FILE_VARIABLE, str(os.getpid())):
            time.sleep(1.0)
        return self._engine.collect()

    def close(self) -> None:
        self._engine.close()


def load_toy(config: WorkerConfig, ref: InstanceRef) -> LoadedEngine:
    if told(FAIL_FILE_VARIABLE, config.name):
        sys.exit("told to fail")
    block_size, pages = config.engine.block_size, config.engine.pages
    memory, segment = page_memory(config, ref, pages, toy_layout(block_size).page_bytes)
    engine = ToyEngine(pages, block_size, buffer=memory)
    step_s = float(os.environ.get(STEP_MS_VARIABLE, "2")) / 1000
    return LoadedEngine(PacedEngine(engine, step_s), memory, segment)


def told(variable: str, word: str) -> bool:
    """Whether the file that the variable names is there and has the word."""
    path = Path(os.environ.get(variable, ""))
    return path.is_file() and word in path.read_text().split()


def run(
    config: WorkerConfig,
    stop: threading.Event,
    on_ready: OnReady,
    *,
    record: Path | None = None,
    drain: threading.Event | None = None,
) -> None:
    app = prefill_worker.app if config.role is Role.PREFILL else decode_worker.app
    app.run(config, stop, on_ready, load=load_toy, record=record, drain=drain)


if __name__ == "__main__":
    sys.exit(main(run))
