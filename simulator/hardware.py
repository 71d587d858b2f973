"""Models and nodes as data, each number with its source, and the cost model that follows from a pair of them.

    token_us     2 * parameters used by a token / (peak FLOP/s * MFU)
    pair_us      4 * layers * query width / (peak FLOP/s * MFU)          scores and weighted values of one (query, key)
    base_us      weight bytes / (memory bandwidth * MBU)                 the weights, read once a step
    kv_token_us  K/V bytes of a token / (memory bandwidth * MBU)

MFU and MBU are free parameters of this form: the defaults are what tuned engines reach on large matrices, and a study
that fits them to something has to say so.
"""

from __future__ import annotations

import msgspec

from segue.cost_model import CostModel, DecodeCost, LinkCost, PrefillCost
from simulator.tiers import TierSpec

MFU = 0.5
"""Share of peak in large matrix products of a whole model; 0.35 is what Mooncake's published ratios fit (claim C3)."""

MBU = 0.7
"""Share of memory bandwidth that a decode step reaches."""

STEP_OVERHEAD_US = 500.0
"""Launching, sampling, synchronising ranks: per step."""

DTYPE_BYTES = {"bf16": 2, "fp8": 1, "fp32": 4}


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What costs depend on. Widths are in elements, per layer."""

    name: str
    layers: int
    query_width: int
    """Heads times their dimension: what a query reads of each key."""
    kv_width: int
    """Stored for each token and layer: K and V of all KV heads, or MLA's latent."""
    parameters: float
    parameters_active: float
    """Used by one token."""
    source: str

    def kv_token_bytes(self, dtype: str = "bf16") -> int:
        """Raises ValueError for a type without a known size."""
        return self.layers * self.kv_width * dtype_bytes(dtype)


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One machine. Rates are per accelerator, but for the network."""

    name: str
    accelerators: int
    flops: dict[str, float]
    """Dense peak by weight type, FLOP/s."""
    memory_bytes: float
    memory_bytes_s: float
    network_bytes_s: float
    """One direction, whole node."""
    dram_bytes_s: float
    """Host memory to accelerators, whole node."""
    dram_bytes: float
    ssd_bytes_s: float = 0.0
    """Local disks, reading, whole node; 0: not known."""
    ssd_bytes: float = 0.0
    source: str


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="llama2-70b",
            layers=80,
            query_width=64 * 128,
            kv_width=2 * 8 * 128,
            parameters=68.98e9,
            parameters_active=68.98e9,
            source="config.json and tensor sizes of meta-llama/Llama-2-70b-hf",
        ),
        ModelShape(
            name="llama3-70b",
            layers=80,
            query_width=64 * 128,
            kv_width=2 * 8 * 128,
            parameters=70.55e9,
            parameters_active=70.55e9,
            source="config.json and tensor sizes of meta-llama/Meta-Llama-3-70B",
        ),
        ModelShape(
            name="llama3.1-8b",
            layers=32,
            query_width=32 * 128,
            kv_width=2 * 8 * 128,
            parameters=8.03e9,
            parameters_active=8.03e9,
            source="config.json and tensor sizes of meta-llama/Llama-3.1-8B",
        ),
        ModelShape(
            name="qwen3-32b",
            layers=64,
            query_width=64 * 128,
            kv_width=2 * 8 * 128,
            parameters=32.76e9,
            parameters_active=32.76e9,
            source="config.json and tensor sizes of Qwen/Qwen3-32B",
        ),
        ModelShape(
            name="deepseek-v3",
            layers=61,
            query_width=128 * 160,
            kv_width=512 + 64,
            parameters=671e9,
            parameters_active=37e9,
            source="DeepSeek-V3 report, section 4.2: 128 heads; scores are 192 wide and values 128, 160 on average",
        ),
        ModelShape(
            name="smollm2-135m",
            layers=30,
            query_width=9 * 64,
            kv_width=2 * 3 * 64,
            parameters=134.5e6,
            parameters_active=134.5e6,
            source="GGUF header of SmolLM2-135M-Instruct",
        ),
    )
}

DGX_DRAM_BYTES, DGX_SSD_BYTES, DGX_SSD_BYTES_S = 2e12, 8 * 3.84e12, 8 * 6.9e9
"""DGX H100 data sheet: 2 TB of memory, 8 x 3.84 TB NVMe; 6.9 GB/s is what a PCIe 4 disk (PM9A3) is sold to read."""

NODES: dict[str, Node] = {
    node.name: node
    for node in (
        Node(
            name="a800",
            accelerators=8,
            flops={"bf16": 312e12},
            memory_bytes=80e9,
            memory_bytes_s=2.039e12,
            network_bytes_s=100e9,
            dram_bytes_s=8 * 25e9,
            dram_bytes=1e12,
            ssd_bytes_s=DGX_SSD_BYTES_S,
            ssd_bytes=DGX_SSD_BYTES,
            source="NVIDIA A100 80GB SXM data sheet (A800: slower NVLink only); Mooncake's: RDMA 800 Gbit/s, 1 TB DRAM",
        ),
        Node(
            name="h800",
            accelerators=8,
            flops={"bf16": 989e12, "fp8": 1979e12},
            memory_bytes=80e9,
            memory_bytes_s=3.35e12,
            network_bytes_s=400e9,
            dram_bytes_s=8 * 50e9,
            dram_bytes=DGX_DRAM_BYTES,
            ssd_bytes_s=DGX_SSD_BYTES_S,
            ssd_bytes=DGX_SSD_BYTES,
            source="NVIDIA H100 SXM data sheet, dense (H800: same but NVLink 400 GB/s); 8 x 400 Gbit/s InfiniBand",
        ),
        Node(
            name="h100",
            accelerators=8,
            flops={"bf16": 989e12, "fp8": 1979e12},
            memory_bytes=80e9,
            memory_bytes_s=3.35e12,
            network_bytes_s=400e9,
            dram_bytes_s=8 * 50e9,
            dram_bytes=DGX_DRAM_BYTES,
            ssd_bytes_s=DGX_SSD_BYTES_S,
            ssd_bytes=DGX_SSD_BYTES,
            source="NVIDIA H100 SXM data sheet, dense; 8 x 400 Gbit/s InfiniBand",
        ),
        Node(
            name="h200",
            accelerators=8,
            flops={"bf16": 989e12, "fp8": 1979e12},
            memory_bytes=141e9,
            memory_bytes_s=4.8e12,
            network_bytes_s=400e9,
            dram_bytes_s=8 * 50e9,
            dram_bytes=DGX_DRAM_BYTES,
            ssd_bytes_s=DGX_SSD_BYTES_S,
            ssd_bytes=DGX_SSD_BYTES,
            source="NVIDIA H200 SXM data sheet, dense; 8 x 400 Gbit/s InfiniBand",
        ),
        Node(
            name="cpu2",
            accelerators=1,
            flops={"fp32": 0.24e12},
            memory_bytes=8e9,
            memory_bytes_s=13e9,
            network_bytes_s=6.4e9,
            dram_bytes_s=13e9,
            dram_bytes=12e9,
            source="two AVX2 cores, measured: SmolLM2 prefill 450 tok/s, decode 14-18, copy 13 GB/s, half of 24 GB",
        ),
    )
}


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill or decode instance: `accelerators` of a node run one copy of the model."""

    model: str
    node: str
    accelerators: int = 8
    weights: str = "bf16"
    kv: str = "bf16"
    mfu: float = MFU
    mbu: float = MBU
    memory_share: float = 0.9
    """Of the memory, for weights and K/V; the rest is activations and graphs."""

    def kv_tokens_total(self) -> int:
        """K/V tokens that fit beside the weights. Raises ValueError when the weights alone do not fit."""
        model, node = find_model(self.model), find_node(self.node)
        room = node.memory_bytes * self.accelerators * self.memory_share - model.parameters * dtype_bytes(self.weights)
        if room <= 0:
            raise ValueError(
                f"{self.model} in {self.weights} does not fit {self.accelerators} accelerators of {self.node}"
            )
        return int(room / model.kv_token_bytes(self.kv))

    def cost_model(self) -> CostModel:
        """Raises ValueError for more accelerators than the node has, and a weight type it has no peak for."""
        model, node = find_model(self.model), find_node(self.node)
        if not 1 <= self.accelerators <= node.accelerators:
            raise ValueError(f"{self.node} has 1 to {node.accelerators} accelerators, got {self.accelerators}")
        if self.weights not in node.flops:
            raise ValueError(f"{self.node} has no peak for {self.weights}; it has {', '.join(sorted(node.flops))}")
        flops_us = node.flops[self.weights] * self.accelerators * self.mfu / 1e6
        bytes_us = node.memory_bytes_s * self.accelerators * self.mbu / 1e6
        token_us = 2.0 * model.parameters_active / flops_us
        pair_us = 4.0 * model.layers * model.query_width / flops_us
        weights_us = model.parameters * dtype_bytes(self.weights) / bytes_us + STEP_OVERHEAD_US
        kv_token_bytes = model.kv_token_bytes(self.kv)
        return CostModel(
            prefill=PrefillCost(base_us=STEP_OVERHEAD_US, token_us=token_us, pair_us=pair_us, floor_us=weights_us),
            decode=DecodeCost(base_us=weights_us, row_us=token_us, kv_token_us=kv_token_bytes / bytes_us),
            kv_token_bytes=kv_token_bytes,
        )

    def network(self) -> LinkCost:
        """Its share of the node's network, one direction."""
        node = find_node(self.node)
        share = self.accelerators / node.accelerators
        return LinkCost(latency_us=50.0, bytes_per_us=node.network_bytes_s * share / 1e6)

    def tier(self, name: str, tokens: int = 0) -> TierSpec:
        """`dram` or `ssd`: its share of the node's bandwidth, and of its capacity unless `tokens` says how much.

        Raises ValueError for another name, and for a node without that tier.
        """
        node = find_node(self.node)
        tiers = {"dram": (node.dram_bytes, node.dram_bytes_s), "ssd": (node.ssd_bytes, node.ssd_bytes_s)}
        if name not in tiers:
            raise ValueError(f"unknown tier {name!r}; known: {', '.join(tiers)}")
        size_bytes, bytes_s = tiers[name]
        if not bytes_s:
            raise ValueError(f"{self.node} has no {name} that is known")
        share = self.accelerators / node.accelerators
        room = int(size_bytes * share / find_model(self.model).kv_token_bytes(self.kv))
        return TierSpec(name=name, tokens=tokens or room, bytes_per_us=bytes_s * share / 1e6)


def dtype_bytes(name: str) -> int:
    """Raises ValueError that lists what is known."""
    if name not in DTYPE_BYTES:
        raise ValueError(f"unknown type {name!r}; known: {', '.join(sorted(DTYPE_BYTES))}")
    return DTYPE_BYTES[name]


def find_model(name: str) -> ModelShape:
    """Raises ValueError that lists what is known."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(sorted(MODELS))}")
    return MODELS[name]


def find_node(name: str) -> Node:
    if name not in NODES:
        raise ValueError(f"unknown hardware {name!r}; known: {', '.join(sorted(NODES))}")
    return NODES[name]


def fetch_break_even_bytes_s(model: str, tokens: int, flops_s: float, kv: str = "bf16") -> float:
    """Bandwidth above which fetching a prefix of `tokens` beats computing it: its K/V bytes over the time that its
    operations take at peak (Mooncake, FAST'25, equation 2; its operations: layers * (4 n^2 d + 22 n d^2))."""
    shape = find_model(model)
    width = shape.query_width
    operations = shape.layers * (4.0 * tokens**2 * width + 22.0 * tokens * width**2)
    return tokens * shape.kv_token_bytes(kv) / (operations / flops_s)
