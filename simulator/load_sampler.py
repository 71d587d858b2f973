"""P's and D's load as a policy sees it, sampled at fixed intervals of a run: what shows whether they swing.

The busy share of engines (`simulator.series`) saturates at 1 and hides by how much an instance is behind. These do not:

    P   seconds of work that wait at each prefill instance (uncached tokens queued, by the cost model)
    D   milliseconds of one step of each decode instance's batch, by the cost model
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from segue.manifest import Role
from simulator.cluster import Cluster
from simulator.event_heap import Rank

SAMPLE_US = 1_000_000


class LoadSample(msgspec.Struct, frozen=True):
    """Means over the prefill and over the decode instances."""

    at_s: float
    waiting_s: float
    step_ms: float


class Swing(msgspec.Struct, frozen=True):
    """Standard deviations, and the correlation of the two loads: anti-phase is a negative one with large deviations."""

    waiting_s: float
    step_ms: float
    correlation: float


class LoadSampler:
    """Put on a cluster before it runs."""

    def __init__(self, cluster: Cluster) -> None:
        self.samples: list[LoadSample] = []
        self._cluster = cluster
        cluster.heap.push(0, Rank.TIMER, self._sample)

    def swing(self, chosen: Callable[[float], bool]) -> Swing:
        """Over the samples at times (s) that are `chosen`. Zeros where fewer than two are."""
        pairs = [(each.waiting_s, each.step_ms) for each in self.samples if chosen(each.at_s)]
        if len(pairs) < 2:
            return Swing(0.0, 0.0, 0.0)
        waiting, step = np.array(pairs).T
        still = not waiting.std() or not step.std()
        correlation = 0.0 if still else float(np.corrcoef(waiting, step)[0, 1])
        return Swing(float(waiting.std()), float(step.std()), correlation)

    def _sample(self) -> None:
        cluster, heap = self._cluster, self._cluster.heap
        cost = cluster.spec.cost
        waiting_us, steps_us = [], []
        for worker in cluster.workers:
            load = worker.core.load()
            if worker.manifest.role is Role.PREFILL:
                waiting_us.append(load.tokens_queued * cost.prefill.token_us)
            else:
                steps_us.append(cost.decode.us(load.running, load.tokens_running))
        waiting_s = sum(waiting_us) / max(len(waiting_us), 1) / 1e6
        self.samples.append(LoadSample(heap.now_us / 1e6, waiting_s, sum(steps_us) / max(len(steps_us), 1) / 1e3))
        heap.push(heap.now_us + SAMPLE_US, Rank.TIMER, self._sample)
