"""Logits equal those of transformers in float32, however the positions are cut into chunks and decodes."""

import random
from pathlib import Path

import pytest
import torch
from step_driver import driver_for
from tiny_checkpoints import family_configs, reference_logits, relative_error, write_checkpoint

from segue.plan import Chunk

TOLERANCE_FP32 = 1e-4
TOKENS = random.Random(3).choices(range(250), k=61)


@pytest.fixture(scope="module", params=list(family_configs()))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    directory = tmp_path_factory.mktemp(request.param)
    return directory, write_checkpoint(family_configs()[request.param], directory)


def test_whole_prompt_in_one_chunk(checkpoint):
    directory, reference = checkpoint
    driver = driver_for(str(directory))
    driver.start(0, TOKENS)
    ours = driver.logits([Chunk(0, 0, len(TOKENS), False)])
    assert relative_error(ours, reference_logits(reference, TOKENS)) <= TOLERANCE_FP32


def test_chunks_then_decodes_beside_other_rows(checkpoint):
    """Row 0 runs 1 + 22 + 17 tokens in chunks and 9 by decode while shorter rows prefill and decode beside it."""
    directory, reference = checkpoint
    driver = driver_for(str(directory))
    short = TOKENS[5:18]
    driver.start(0, TOKENS[:40])
    driver.start(2, short)
    driver.logits([Chunk(0, 0, 1, False), Chunk(2, 0, 5, False)])
    first = driver.logits([Chunk(2, 5, 8, False), Chunk(0, 1, 22, False)])
    second = driver.logits([Chunk(0, 23, 17, False)], decodes=[2])
    expected = reference_logits(reference, TOKENS)
    expected_short = reference_logits(reference, short)
    assert relative_error(first[:8], expected_short[5:13]) <= TOLERANCE_FP32
    assert relative_error(first[8:], expected[1:23]) <= TOLERANCE_FP32
    assert relative_error(second[:17], expected[23:40]) <= TOLERANCE_FP32
    assert relative_error(second[17:], expected_short[12:]) <= TOLERANCE_FP32
    for position in range(40, 49):
        driver.state.tokens[0, position] = TOKENS[position]
        driver.state.tokens_known[0] += 1
        ours = driver.logits(decodes=[0, 2])
        assert relative_error(ours[:1], expected[position : position + 1]) <= TOLERANCE_FP32
        assert relative_error(ours[1:], expected_short[12:]) <= TOLERANCE_FP32


def test_decode_ignores_leftovers_of_earlier_owners(checkpoint):
    """Pages start as NaN in the driver: a finite result shows that nothing behind a row's end was read."""
    directory, _ = checkpoint
    driver = driver_for(str(directory))
    driver.start(1, TOKENS[:9])
    driver.start(3, TOKENS[:30])
    driver.logits([Chunk(1, 0, 9, False), Chunk(3, 0, 30, False)])
    assert torch.isfinite(driver.logits(decodes=[1, 3])).all()


def test_sharded_checkpoint_gives_the_same_logits(tmp_path):
    config = family_configs()["llama"]
    reference = write_checkpoint(config, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    driver = driver_for(str(tmp_path))
    driver.start(0, TOKENS)
    ours = driver.logits([Chunk(0, 0, len(TOKENS), False)])
    assert relative_error(ours, reference_logits(reference, TOKENS)) <= TOLERANCE_FP32
