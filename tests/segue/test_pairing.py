"""Two instances that do not fit are told in what they differ."""

from __future__ import annotations

import msgspec
import pytest

from segue.ids import InstanceRef
from segue.kv_layout import KvLayout
from segue.manifest import InstanceManifest, Role, pairing_refusal
from segue.wire_version import WIRE_VERSION

LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=4, block_size=16, dtype="float32")
PREFILL = InstanceManifest(
    ref=InstanceRef("p", 1),
    name="prefill-0",
    role=Role.PREFILL,
    host="host",
    pid=1,
    model="toy",
    card_digest="card",
    kv_root="aa",
    layout=LAYOUT,
    pages_total=64,
    max_model_len=200,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    control_address="",
    events_address="",
)
DECODE = msgspec.structs.replace(PREFILL, ref=InstanceRef("d", 1), name="decode-0", role=Role.DECODE)


def test_instances_of_one_model_and_layout_fit() -> None:
    assert pairing_refusal(PREFILL, DECODE) is None


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"wire_version": WIRE_VERSION + 1}, "wire version"),
        ({"model": "other"}, "model"),
        ({"numerics": "cpu AVX2"}, "batch-invariant arithmetic"),
        ({"kv_root": "bb"}, "weights, tokenizer or attention configuration"),
        ({"layout": msgspec.structs.replace(LAYOUT, dtype="bfloat16")}, "KV dtype"),
        ({"layout": msgspec.structs.replace(LAYOUT, block_size=64)}, "block size"),
        ({"layout": msgspec.structs.replace(LAYOUT, layers=3)}, "KV layout"),
    ],
)
def test_what_differs_is_named(changes: dict[str, object], what: str) -> None:
    refusal = pairing_refusal(PREFILL, msgspec.structs.replace(DECODE, **changes))
    assert refusal is not None
    assert refusal.startswith(f"{what} differs: prefill-0 has ")
