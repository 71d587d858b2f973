"""Predictive admission: whether a request would meet its objectives where it would land, or should wait, or be told no.

A choice of instances is taken when the calibrated 90 % bounds of TTFT and TPOT meet the objectives. Before a request is
rejected it is tried elsewhere, in the order of the ranking, and waits for as long as its TTFT objective leaves time: a
decode batch shrinks while it waits. Only two things reject: no choice meets the TTFT objective even at once, which no
wait mends, or the time is up. Nothing is computed for a request before it is admitted, so no prefill is wasted.

There is no cliff in this, because each decision looks at the margin (one request more at the state that it will find),
and no swing between P and D, because D's state counts what P has still in its pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from conductor.core.admission_queue import AdmissionQueue, Waiting
from conductor.core.decision_log import CANDIDATES_KEPT, Considered, DecisionLog, Explanation
from conductor.core.decisions import Reject
from conductor.core.events import RequestArrived
from conductor.core.latency import LatencyForecast, Terms
from conductor.core.policy import Choice, Refusal

CHOICES_TRIED_MAX = 8
"""Alternatives whose terms are predicted when the better ranked ones would miss an objective."""

CHOICES_EXPLAINED = 3
"""Predicted even when the first will do, so that an explanation shows what it was compared with."""

PROBE_US = 10_000_000
"""When nothing was admitted for so long, one request is, whatever is predicted: a wrong prediction must not last."""

RETRY_AFTER_MS_MIN = 100
RETRY_AFTER_MS_MAX = 30_000

INTERVAL_WEIGHT = 0.05
SHARE_WEIGHT = 0.02


class Objectives(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT at most `ttft_us`, or `ttft_factor` times what an idle instance takes for the prompt where that is more: a
    long prompt is not refused for its length. TPOT at most `tpot_us`."""

    ttft_us: float = float("inf")
    ttft_factor: float = 3.0
    tpot_us: float = float("inf")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`choice` is taken; else `refusal` is told; else the request waits. `reason` is for the explanation."""

    reason: str
    considered: tuple[Considered, ...]
    choice: Choice | None = None
    terms: Terms | None = None
    refusal: Refusal | None = None


class Admission:
    """Keeps the log of what was decided and why."""

    def __init__(self, objectives: Objectives | None, forecast: LatencyForecast, queue: AdmissionQueue) -> None:
        self.log = DecisionLog()
        self._objectives = objectives
        self._forecast = forecast
        self._queue = queue
        self._share_computed = 1.0
        """Recent mean share of a prompt that had to be computed."""
        self._placed_last_us: dict[str, int] = {}
        """Of each model; when a request was first judged, before any was placed."""
        self._placed_us: int | None = None
        self._interval_us = 0.0
        """Recent mean between two placements while others waited: what the bottleneck lets through, whichever it is."""

    def push(self, request: RequestArrived, now_us: int) -> Waiting:
        """Into the queue, with the time that its objective leaves. A stream that runs already has no objective left."""
        prefill_us = self._forecast.prefill_us(request.model, request.tokens_known)
        budget_us = 0
        if self._objectives is not None and request.attempt == 1:
            budget = max(self._objectives.ttft_us, self._objectives.ttft_factor * prefill_us)
            budget_us = 0 if budget == float("inf") else max(1, int(budget))
        return self._queue.push(request, now_us, budget_us=budget_us, prefill_us=prefill_us)

    def hopeless(self, waiting: Waiting, instances: int, now_us: int) -> Refusal | None:
        """Why waiting cannot help: what is ahead in the queue alone takes longer than the objective leaves."""
        if not waiting.budget_us:
            return None
        count, prefill_us = self._queue.ahead(waiting)
        computed_us = prefill_us * self._share_computed / max(instances, 1)
        wait_us = max(computed_us, count * self._interval_us)
        late_us = now_us - waiting.queued_us + wait_us + self._least_us(waiting) - waiting.budget_us
        if late_us <= 0:
            return None
        reason = (
            f"{count} requests are ahead: about {wait_us / 1e6:.2f} s, the objective for TTFT is "
            f"{waiting.budget_us / 1e6:.2f} s"
        )
        return Refusal(reason=reason, resource="queue", retry_after_ms=_retry_after_ms(late_us))

    def judge(self, waiting: Waiting, ranked: Sequence[Choice], now_us: int) -> Verdict:
        """`ranked` is not empty: instances that have room now, the best first."""
        considered: list[Considered] = []
        chosen: tuple[Choice, Terms | None] | None = None
        late_us, misses = float("inf"), set()
        for place, choice in enumerate(ranked[:CHOICES_TRIED_MAX]):
            if chosen is not None and place >= CHOICES_EXPLAINED:
                break
            terms = self._forecast.terms(waiting.request, choice, now_us, now_us - waiting.queued_us)
            miss, by_us = self._miss(waiting, terms, now_us)
            verdict = miss
            if chosen is None and not miss:
                chosen, verdict = (choice, terms), "chosen"
            if miss:
                misses.add(miss.partition(" ")[0])
                late_us = min(late_us, by_us)
            considered.append(_considered(choice, terms, verdict))
        kept = tuple(considered[:CANDIDATES_KEPT])
        if chosen is not None:
            return Verdict(reason=self._why(waiting), considered=kept, choice=chosen[0], terms=chosen[1])
        if now_us - self._placed_last_us.setdefault(waiting.request.model, now_us) >= PROBE_US:
            terms = considered[0].terms
            probed = (msgspec.structs.replace(considered[0], verdict="chosen"), *kept[1:])
            reason = f"a probe: nothing was admitted for {PROBE_US // 1_000_000} s; predicted {considered[0].verdict}"
            return Verdict(reason=reason, considered=probed, choice=ranked[0], terms=terms)
        if misses != {"TTFT"} and self._has_time(waiting, now_us):
            return Verdict(reason="waits for a smaller batch", considered=kept)
        refusal = self._refusal(waiting, misses, kept, late_us)
        return Verdict(reason=refusal.reason, considered=kept, refusal=refusal)

    def placed(self, waiting: Waiting, verdict: Verdict, choices: int, now_us: int) -> None:
        """It left the queue for its choice: load from now on, charged to its tenant; the pace of the queue is noted."""
        request, choice, terms = waiting.request, verdict.choice, verdict.terms
        assert choice is not None, "a placed request has a choice"
        self._forecast.routed(request, choice, terms, now_us)
        self.log.add(_explanation(request, now_us, now_us - waiting.queued_us, "routed", verdict, choices))
        self._placed_last_us[request.model] = now_us
        computed = choice.tokens_compute / request.tokens_known
        self._share_computed += SHARE_WEIGHT * (computed - self._share_computed)
        batch = 1.0 if terms is None else terms.batch
        self._queue.charge(waiting, self._forecast.gpu_us(request, choice.tokens_compute, batch))
        if self._placed_us is not None:
            interval_us = now_us - self._placed_us
            self._interval_us += INTERVAL_WEIGHT * (interval_us - self._interval_us)
        self._placed_us = now_us if len(self._queue) else None

    def rejected(
        self,
        request: RequestArrived,
        reject: Reject,
        now_us: int,
        waited_us: int,
        verdict: Verdict | None,
        choices: int,
    ) -> None:
        """For the log."""
        told = Verdict(reason=reject.message, considered=() if verdict is None else verdict.considered)
        self.log.add(_explanation(request, now_us, waited_us, "rejected", told, choices))

    def overdue(self, waiting: Waiting, now_us: int) -> Refusal | None:
        """Its time is up; None when it was not the objective's."""
        if not waiting.budget_us or now_us < waiting.queued_us + waiting.budget_us:
            return None
        waited_ms = (now_us - waiting.queued_us) // 1000
        return Refusal(
            reason=f"no instance could take it for {waited_ms} ms, which is its objective for TTFT",
            resource="instances",
            retry_after_ms=_retry_after_ms(float(waiting.budget_us)),
        )

    def _miss(self, waiting: Waiting, terms: Terms | None, now_us: int) -> tuple[str, float]:
        """Which objective this candidate would miss, and by how much; ("", 0) for none."""
        objectives = self._objectives
        if objectives is None or terms is None or waiting.request.attempt > 1:
            return "", 0.0
        ttft_us = now_us - waiting.queued_us + terms.ttft_q90_us
        if waiting.budget_us and ttft_us > waiting.budget_us:
            return f"TTFT {ttft_us / 1e6:.2f} s > {waiting.budget_us / 1e6:.2f} s", ttft_us - waiting.budget_us
        if terms.tpot_q90_us > objectives.tpot_us:
            miss = f"TPOT {terms.tpot_q90_us / 1e3:.1f} ms > {objectives.tpot_us / 1e3:.1f} ms"
            return miss, terms.tpot_q90_us - objectives.tpot_us
        return "", 0.0

    def _has_time(self, waiting: Waiting, now_us: int) -> bool:
        if not waiting.budget_us:
            return True
        return now_us - waiting.queued_us + self._least_us(waiting) < waiting.budget_us

    def _least_us(self, waiting: Waiting) -> float:
        """Prefill of what is probably not cached."""
        return waiting.prefill_us * min(self._share_computed, 1.0)

    def _why(self, waiting: Waiting) -> str:
        drift = self._forecast.drift(waiting.request.model)
        careful = f"; bounds are widened where predictions drifted: {drift}" if drift else ""
        if self._objectives is None:
            return f"no objectives: the best ranked{careful}"
        return f"the best ranked that meets the objectives{careful}"

    def _refusal(
        self, waiting: Waiting, misses: set[str], considered: tuple[Considered, ...], late_us: float
    ) -> Refusal:
        resource = "prefill" if misses == {"TTFT"} else "decode"
        nearest = considered[0].verdict
        drift = self._forecast.drift(waiting.request.model)
        careful = f" (bounds widened: {drift})" if drift else ""
        wait_us = late_us if resource == "prefill" else float(waiting.budget_us)
        return Refusal(
            reason=f"predicted {nearest} on the best of {len(considered)} choices{careful}",
            resource=resource,
            retry_after_ms=_retry_after_ms(wait_us),
        )


def _considered(choice: Choice, terms: Terms | None, verdict: str) -> Considered:
    return Considered(
        prefill="" if choice.prefill is None else choice.prefill.manifest.name,
        decode=choice.decode.manifest.name,
        source="" if choice.source is None else choice.source.manifest.name,
        cost=choice.cost,
        tokens_compute=choice.tokens_compute,
        tokens_cached=choice.tokens_cached,
        terms=terms,
        verdict=verdict,
    )


def _explanation(
    request: RequestArrived, now_us: int, waited_us: int, decision: str, verdict: Verdict, choices: int
) -> Explanation:
    return Explanation(
        key=request.key,
        model=request.model,
        tenant=request.tenant,
        priority=request.priority,
        tokens_known=request.tokens_known,
        decided_us=now_us,
        waited_us=waited_us,
        decision=decision,
        reason=verdict.reason,
        candidates=verdict.considered,
        candidates_total=choices,
    )


def _retry_after_ms(late_us: float) -> int:
    return max(RETRY_AFTER_MS_MIN, min(int(late_us / 1000), RETRY_AFTER_MS_MAX))
