"""What a request would see on a choice of instances, before it is placed; and how right that was, afterwards.

    TTFT = prompts waiting at P + prefill of what P lacks
    TPOT = one decode step of the batch and K/V that D will have when the request lands there

Loads are counted from the decision on (`Instance.prefill_work`, `DecodeLoad`), so that prefill in the pipeline is load
of D before it arrives. Each model has one cost model, corrected online, and calibrated bounds; each instance has a
slowness of its own. Outcomes are the only clock of what really happened: no worker is asked for anything.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from conductor.core.beliefs import Beliefs
from conductor.core.decode_load import DecodeLoad, Landing
from conductor.core.events import RequestArrived
from conductor.core.instance import PREFILL_SHARE_MAX, PREFILL_SHARE_US, Instance
from conductor.core.policy import Choice
from segue.calibration import Calibration, Drift
from segue.cost_model import CostModel, PrefillCost
from segue.ids import AttemptRef
from segue.kv_events import LoadReport
from segue.manifest import Role
from segue.online_cost import OnlineCost
from segue.output_lengths import OutputLengths
from segue.worker_messages import Outcome, OutcomeKind

ENDED_KEPT = 1_024
"""Attempts that their gateway ended before the instance's last word: it is still on its way."""

TOKENS_TIMED = 8
"""Where load reports are too rare to show a step, answers of so many tokens do: fewer would time the hand-off."""

KINDS = ("ttft", "tpot", "prefill")

STEADY_CHANGE = 0.2
"""Of batch and K/V between two load reports, for its step time to count as that of this batch."""

SLOWNESS_WEIGHT = 0.1
SLOWNESS_MIN, SLOWNESS_MAX = 0.25, 8.0
"""Bounds of what an instance's own steps may say against the model of its kind."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate's prediction, in microseconds from the decision on. `_q90` are calibrated bounds."""

    queue_us: float
    """Prompts that wait, or run, at the computing instance."""
    prefill_us: float
    ttft_us: float
    ttft_q90_us: float
    batch: float
    """Expected sequences in D's batch at landing, this one included."""
    kv_tokens: float
    tpot_us: float
    tpot_q90_us: float


class Actual(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an attempt that was predicted. 0: not known."""

    ttft_us: int = 0
    tpot_us: float = 0.0
    tokens_generated: int = 0


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """How well the bounds of one kind of prediction hold for one model."""

    model: str
    kind: str
    coverage: float | None
    drift: Drift


class _Model:
    def __init__(self, prior: CostModel | None) -> None:
        self.cost = OnlineCost(prior)
        self.lengths = OutputLengths()
        # Before anything was observed the prediction itself is the bound: a wider one could keep the first requests out
        # for ever, and nothing would be learned.
        self.bounds = {kind: Calibration(prior_ratio=1.0) for kind in KINDS}


class _Tracked:
    __slots__ = ("decided_us", "decode", "first_us", "prefill", "request", "started_us", "terms")

    def __init__(self, request: RequestArrived, choice: Choice, terms: Terms | None, now_us: int) -> None:
        self.request = request
        self.prefill = (choice.prefill or choice.decode).uuid
        self.decode = choice.decode.uuid
        self.terms = terms
        self.decided_us = now_us
        self.started_us = now_us
        """Since when nothing but the prompts before it kept it from being computed."""
        self.first_us = 0


class LatencyForecast:
    """`prior` is where every model's cost starts from; None: it is learned, and predicted only then."""

    def __init__(self, prior: CostModel | None = None) -> None:
        self._prior = prior
        self._models: dict[str, _Model] = {}
        self._computed_us: dict[str, int] = {}
        """When each instance was done with its last prompt."""
        self._decodes: dict[str, DecodeLoad] = {}
        self._live: dict[AttemptRef, _Tracked] = {}
        self._ended: OrderedDict[AttemptRef, _Tracked] = OrderedDict()

    # -- predicting

    def terms(self, request: RequestArrived, choice: Choice, now_us: int, waited_us: int = 0) -> Terms | None:
        """None while nothing is known of the model's costs. A policy's own TTFT, which counts what was waited already
        and what has to be fetched, comes first."""
        model = self._model(request.model)
        prefill, decode = model.cost.prefill, model.cost.decode
        if prefill is None or decode is None:
            return None
        at_decode = choice.prefill is None or not choice.tokens_compute
        where = choice.decode if choice.prefill is None or at_decode else choice.prefill
        queue_us = _queue_us(where, prefill, now_us)
        missing = choice.tokens_compute or request.tokens_known - choice.tokens_cached
        prefill_us = prefill.us(missing, choice.tokens_cached)
        if choice.compute_us:
            prefill_us = choice.compute_us * where.prefill_work.slowness
        landing = self._advanced(choice.decode, model, now_us)
        step_us = self._step_us(choice.decode, model)
        if at_decode:
            prefill_us += step_us
        ttft_us = choice.ttft_us - waited_us if choice.ttft_us else queue_us + prefill_us
        ahead = landing.ahead(ttft_us / max(step_us, 1.0), model.lengths)
        kv_tokens = ahead.kv_tokens + request.tokens_known
        tpot_us = decode.us(1, 0) + (ahead.batch * decode.row_us + kv_tokens * decode.kv_token_us)
        # Prompts that D computes itself stand between the steps of everybody there.
        computed_us = prefill_us if at_decode else 0.0
        share = choice.decode.prefill_share(now_us) + computed_us / PREFILL_SHARE_US
        tpot_us *= landing.slowness / (1.0 - min(share, PREFILL_SHARE_MAX))
        return Terms(
            queue_us=queue_us,
            prefill_us=prefill_us,
            ttft_us=ttft_us,
            ttft_q90_us=model.bounds["ttft"].quantile_us(ttft_us),
            batch=ahead.batch + 1,
            kv_tokens=kv_tokens,
            tpot_us=tpot_us,
            tpot_q90_us=model.bounds["tpot"].quantile_us(tpot_us),
        )

    def corrected(self, model: str, beliefs: Beliefs) -> Beliefs:
        """`beliefs` with what was learned of the model's costs in place of what they began with."""
        cost, believed = self._model(model).cost, beliefs.cost
        prefill, decode = cost.prefill or believed.prefill, cost.decode or believed.decode
        if prefill is believed.prefill and decode is believed.decode:
            return beliefs
        learned = CostModel(prefill=prefill, decode=decode, kv_token_bytes=believed.kv_token_bytes)
        return msgspec.structs.replace(beliefs, cost=learned)

    def prefill_us(self, model: str, new: int, cached: int = 0) -> float:
        """Of an idle instance; 0 while nothing is known."""
        cost = self._model(model).cost.prefill
        return 0.0 if cost is None else cost.us(new, cached)

    def gpu_us(self, request: RequestArrived, tokens_compute: int, batch: float) -> float:
        """GPU time that a request takes from the others: its prefill, and its share of the decode steps to come."""
        model = self._model(request.model)
        prefill, decode = model.cost.prefill, model.cost.decode
        if prefill is None or decode is None:
            return float(request.tokens_known)
        generated = request.tokens_known - request.tokens_prompt
        tokens = model.lengths.remaining_mean(generated, max(0, request.tokens_max - request.tokens_known))
        share_us = decode.base_us / max(batch, 1.0) + decode.row_us + decode.kv_token_us * request.tokens_known
        return prefill.us(tokens_compute, request.tokens_known - tokens_compute) + tokens * share_us

    def is_calibrated(self, model: str) -> bool:
        """Whether enough was observed for bounds that mean something."""
        bounds = self._model(model).bounds
        return self._model(model).cost.is_known and bounds["ttft"].is_ready and bounds["tpot"].is_ready

    def coverages(self) -> list[Coverage]:
        return [
            Coverage(model=name, kind=kind, coverage=bound.coverage, drift=bound.drift)
            for name, model in self._models.items()
            for kind, bound in model.bounds.items()
        ]

    def drifts(self) -> dict[str, str]:
        """`drift` of every model that was asked for so far."""
        return {model: self.drift(model) for model in self._models}

    def drift(self, model: str) -> str:
        """Kinds of prediction whose bounds do not hold as they should, in words; empty when all do."""
        bounds = self._model(model).bounds
        return ", ".join(f"{kind} {bound.drift}" for kind, bound in bounds.items() if bound.drift)

    # -- following

    def routed(self, request: RequestArrived, choice: Choice, terms: Terms | None, now_us: int) -> None:
        """The choice was taken: it is load from now on."""
        tracked = _Tracked(request, choice, terms, now_us)
        self._live[request.key] = tracked
        self._decode_load(choice.decode).book(request.key, request.tokens_known)

    def report(self, key: AttemptRef, reporter: str, outcome: Outcome, now_us: int) -> Actual | None:
        """One outcome, late ones too. What it reveals of the attempt's latency, if anything."""
        tracked = self._live.get(key) or self._ended.get(key)
        if tracked is None:
            return None
        match outcome.kind:
            case OutcomeKind.PREFILL_STARTED:
                tracked.started_us = now_us
            case OutcomeKind.PREFILL_DONE:
                return self._first_token(key, tracked, reporter, outcome, now_us)
            case OutcomeKind.HANDOFF_COMPLETE:
                self._land(key, tracked, now_us)
            case OutcomeKind.FINISHED | OutcomeKind.DONE_AT_P:
                return self._finished(tracked, outcome, now_us)
        return None

    def ended(self, key: AttemptRef) -> None:
        """The attempt is over, whoever ended it. No change when it is not tracked."""
        tracked = self._live.pop(key, None)
        if tracked is None:
            return
        load = self._decodes.get(tracked.decode)
        if load is not None:
            load.remove(key)
        self._ended[key] = tracked
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def cut_off(self, request: RequestArrived, tokens: int) -> None:
        """An answer ended by a cancel after `tokens`."""
        self._model(request.model).lengths.learn(tokens, cut_off=True)

    def take_load(self, instance: Instance, report: LoadReport, now_us: int) -> None:
        """A report that `instance` has taken. One of a pure decode batch is a measured step."""
        model = self._model(instance.manifest.model)
        load = self._decode_load(instance)
        own = instance.booked_rows
        load.others_rows = max(0, report.running - own)
        load.others_tokens = report.tokens_running * load.others_rows // report.running if report.running else 0
        before, load.reported = load.reported, Landing(report.running, report.tokens_running)
        if not report.running:
            load.slowness += SLOWNESS_WEIGHT * (1.0 - load.slowness)
        if instance.manifest.role is not Role.DECODE or report.tokens_queued or not report.step_us:
            return
        if not _is_steady(before, load.reported):
            return
        cost = model.cost.decode
        if cost is not None:
            predicted_us = cost.us(report.running, report.tokens_running)
            ratio = min(max(report.step_us / max(predicted_us, 1.0), SLOWNESS_MIN), SLOWNESS_MAX)
            load.slowness += SLOWNESS_WEIGHT * (ratio - load.slowness)
        self._advanced(instance, model, now_us)
        model.cost.observe_decode(report.running, report.tokens_running, report.step_us)

    def forget(self, uuid: str) -> None:
        """The instance is gone, with all that waited there."""
        self._computed_us.pop(uuid, None)
        self._decodes.pop(uuid, None)

    def check(self) -> None:
        for load in self._decodes.values():
            load.check()
        assert len(self._ended) <= ENDED_KEPT, "more ended attempts are remembered than allowed"

    # -- one outcome

    def _first_token(
        self, key: AttemptRef, tracked: _Tracked, reporter: str, outcome: Outcome, now_us: int
    ) -> Actual | None:
        if tracked.first_us:
            return None
        tracked.first_us = now_us
        model, request = self._model(tracked.request.model), tracked.request
        taken_us = now_us - max(tracked.started_us, self._computed_us.get(reporter, 0))
        self._computed_us[reporter] = now_us
        if taken_us > 0 and request.tokens_known > outcome.tokens_cached:
            new = request.tokens_known - outcome.tokens_cached
            if model.cost.prefill is not None:
                model.bounds["prefill"].observe(model.cost.prefill.us(new, outcome.tokens_cached), taken_us)
            if model.cost.prefill is None or self._was_alone(tracked):
                model.cost.observe_prefill(new, outcome.tokens_cached, taken_us)
        if tracked.prefill == tracked.decode:
            self._land(key, tracked, now_us)
        if tracked.terms is not None:
            model.bounds["ttft"].observe(tracked.terms.ttft_us, now_us - tracked.decided_us)
        return Actual(ttft_us=now_us - tracked.decided_us)

    def _was_alone(self, tracked: _Tracked) -> bool:
        """Whether no decode step took time from the prompt."""
        if tracked.prefill != tracked.decode:
            return True
        load = self._decodes.get(tracked.decode)
        return load is None or not load.rows

    def _land(self, key: AttemptRef, tracked: _Tracked, now_us: int) -> None:
        load = self._decodes.get(tracked.decode)
        if load is None or key not in self._live:
            return
        request = tracked.request
        load.advance(now_us, self._step_of(load, self._model(request.model)))
        generated = request.tokens_known - request.tokens_prompt
        load.land(key, request.tokens_prompt, generated, request.tokens_max - request.tokens_prompt)

    def _finished(self, tracked: _Tracked, outcome: Outcome, now_us: int) -> Actual | None:
        model, request = self._model(tracked.request.model), tracked.request
        earlier = request.tokens_known - request.tokens_prompt
        if outcome.tokens_generated:
            cut_off = outcome.reason == "length"
            model.lengths.learn(earlier + outcome.tokens_generated, cut_off=cut_off)
        if outcome.tokens_generated < 2 or not tracked.first_us:
            return Actual(tokens_generated=outcome.tokens_generated)
        tpot_us = (now_us - tracked.first_us) / (outcome.tokens_generated - 1)
        load = self._decodes.get(tracked.decode)
        if model.cost.decode is None and load is not None and outcome.tokens_generated >= TOKENS_TIMED:
            present = load.running()
            model.cost.observe_decode(max(1, round(present.batch)), present.kv_tokens, tpot_us)
        if tracked.terms is not None:
            model.bounds["tpot"].observe(tracked.terms.tpot_us, tpot_us)
        return Actual(tpot_us=tpot_us, tokens_generated=outcome.tokens_generated)

    # -- parts

    def _model(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = _Model(self._prior)
        return model

    def _decode_load(self, instance: Instance) -> DecodeLoad:
        return self._decodes.setdefault(instance.uuid, DecodeLoad())

    def _advanced(self, instance: Instance, model: _Model, now_us: int) -> DecodeLoad:
        load = self._decode_load(instance)
        load.advance(now_us, self._step_of(load, model))
        return load

    def _step_us(self, instance: Instance, model: _Model) -> float:
        return self._step_of(self._decode_load(instance), model)

    def _step_of(self, load: DecodeLoad, model: _Model) -> float:
        """Of the batch that runs at this moment, by our own book."""
        cost = model.cost.decode
        if cost is None:
            return 0.0
        present = load.running()
        return cost.us(max(1, round(present.batch)), present.kv_tokens) * load.slowness


def _is_steady(before: Landing, now: Landing) -> bool:
    """Whether a mean of recent step times belongs to the batch that a report shows."""
    if not now.batch or not before.batch:
        return False
    pairs = ((before.batch, now.batch), (before.kv_tokens, now.kv_tokens))
    return all(abs(late - early) <= STEADY_CHANGE * late for early, late in pairs)


def _queue_us(instance: Instance, cost: PrefillCost, now_us: int) -> float:
    """Until what is booked there now is computed. Work that was not predicted counts by its tokens."""
    work = instance.prefill_work
    booked_us = work.remaining_us(now_us) if len(work) else instance.booked_tokens * cost.token_us
    return booked_us + instance.others_tokens * cost.token_us
