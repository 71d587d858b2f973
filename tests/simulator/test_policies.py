"""Each opponent against its published rule, on fleets whose right choice can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from conductor.core.events import RequestArrived
from conductor.core.fleet import Candidates
from conductor.core.health import HealthBook
from conductor.core.instance import Instance
from conductor.core.policy import Choice, Query, Refusal
from segue.cost_model import CostModel, DecodeCost, LinkCost, PrefillCost
from segue.ids import InstanceRef
from segue.kv_events import LoadReport
from segue.kv_layout import KvLayout
from segue.manifest import InstanceManifest, Role
from simulator.policies import Dynamo, Fetch, Mooncake, PolicyContext, make_policy, sglang_pick

BLOCK = 16
COST = CostModel(
    prefill=PrefillCost(base_us=0.0, token_us=100.0, pair_us=0.0),
    decode=DecodeCost(base_us=10_000.0, row_us=100.0, kv_token_us=0.1),
    kv_token_bytes=1_000,
)
CONTEXT = PolicyContext(cost=COST, link=LinkCost(latency_us=0.0, bytes_per_us=1_000.0))
"""A token is computed in 100 us and moved in 1 us."""


def instance(name: str, role: Role, *, tokens: int = 0, rows: int = 0, pages: int = 0) -> Instance:
    manifest = InstanceManifest(
        ref=InstanceRef(name, 1),
        name=name,
        role=role,
        host="",
        pid=0,
        model="toy",
        card_digest="",
        kv_root="",
        layout=KvLayout(layers=1, kv_heads=1, head_dim=1, block_size=BLOCK, dtype="float32"),
        pages_total=10_000,
        max_model_len=0,
        max_num_seqs=512,
        max_num_batched_tokens=2_048,
        control_address="",
        events_address="",
    )
    made = Instance(manifest, 0)
    made.booked_tokens, made.booked_rows, made.booked_pages = tokens, rows, pages
    return made


def report(of: Instance, *, waiting: int, pages_active: int) -> LoadReport:
    return LoadReport(
        ref=of.ref,
        sequence=1,
        running=0,
        waiting=waiting,
        tokens_queued=0,
        tokens_running=0,
        pages_free=of.manifest.pages_total - pages_active,
        pages_active=pages_active,
        pages_cached=0,
        pages_held=0,
        pages_quarantined=0,
        pages_total=of.manifest.pages_total,
        step_us=0,
    )


def prefills(*loads: int) -> list[Instance]:
    return [instance(f"p{number}", Role.PREFILL, tokens=load) for number, load in enumerate(loads)]


def decodes(*rows: int) -> list[Instance]:
    return [instance(f"d{number}", Role.DECODE, rows=count, pages=count * 10) for number, count in enumerate(rows)]


def query(tokens: int, held: Mapping[str, int] | None = None) -> Query:
    request = RequestArrived(
        request_id="r",
        attempt=1,
        model="toy",
        tokens_prompt=tokens,
        tokens_known=tokens,
        tokens_max=tokens + 100,
        hash_root=b"",
        block_hashes=[],
    )
    return Query(request=request, tokens_growth=50, held=held or {}, held_soon=held or {}, now_us=0, tie_hash=7)


def choose(policy: object, asked: Query, p: list[Instance], d: list[Instance]) -> Choice | None:
    ranked = policy.rank(asked, Candidates(prefills=p, decodes=d), HealthBook())  # type: ignore[attr-defined]
    return ranked[0] if ranked else None


def names(choice: Choice | None) -> tuple[str, str]:
    assert choice is not None
    return ("" if choice.prefill is None else choice.prefill.uuid, choice.decode.uuid)


def test_round_robin_takes_turns_on_both_sides() -> None:
    policy, p, d = make_policy("round-robin", CONTEXT), prefills(0, 0), decodes(0, 0, 0)
    seen = [names(choose(policy, query(64), p, d)) for _ in range(4)]
    assert seen == [("p0", "d0"), ("p1", "d1"), ("p0", "d2"), ("p1", "d0")]


def test_random_is_even_and_repeats_with_its_seed() -> None:
    def draw(seed: int) -> list[tuple[str, str]]:
        policy = make_policy("random", msgspec.structs.replace(CONTEXT, seed=seed))
        p, d = prefills(0, 9_000), decodes(0, 9)
        return [names(choose(policy, query(64), p, d)) for _ in range(400)]

    assert draw(1) == draw(1) != draw(2)
    assert sum(prefill == "p1" for prefill, _ in draw(1)) == pytest.approx(200, abs=40)


def test_least_loaded_looks_at_tokens_at_p_and_requests_at_d() -> None:
    policy = make_policy("least-loaded", CONTEXT)
    assert names(choose(policy, query(64), prefills(500, 20, 90), decodes(3, 2, 9))) == ("p1", "d1")


@pytest.mark.parametrize(
    ("held", "queued", "chosen", "fetch"),
    [
        pytest.param({}, (1_000, 900), "p1", None, id="nothing cached: shortest queue"),
        pytest.param({"p0": 800}, (700, 0), "p1", Fetch("p0", "p1", 50), id="fetch beats both queue and recompute"),
        pytest.param({"p0": 800, "p1": 500}, (0, 0), "p0", None, id="the best prefix is here"),
        pytest.param({"p0": 800, "p1": 500}, (400, 0), "p1", None, id="within the threshold: recompute the rest"),
    ],
)
def test_mooncake_takes_the_least_predicted_ttft(
    held: dict[str, int], queued: tuple[int, int], chosen: str, fetch: Fetch | None
) -> None:
    context = msgspec.structs.replace(CONTEXT, notes=type(CONTEXT.notes)())
    asked = query(1_000, held)
    choice = choose(Mooncake(context), asked, prefills(*queued), decodes(0))
    assert names(choice)[0] == chosen
    assert context.notes.fetches.get(asked.request.key) == fetch


def test_without_fetching_each_instance_counts_by_its_own_cache() -> None:
    context = msgspec.structs.replace(CONTEXT, notes=type(CONTEXT.notes)())
    policy = make_policy("mooncake-local", context)
    assert names(choose(policy, query(1_000, {"p0": 800}), prefills(700, 0), decodes(0))) == ("p0", "d0")
    assert names(choose(policy, query(1_000, {"p0": 800}), prefills(900, 0), decodes(0))) == ("p1", "d0")
    assert not context.notes.fetches


def test_mooncake_predicts_queue_transfer_and_prefill() -> None:
    policy = Mooncake(CONTEXT)
    (busy,) = prefills(300)
    assert policy.ttft_us(query(1_000), busy, best=0) == 300 * 100 + 1_000 * 100
    assert policy.ttft_us(query(1_000, {"x": 800}), busy, best=800) == 800 * 1 + 300 * 100 + 200 * 100


@pytest.mark.parametrize(("ttft_us", "tpot_us"), [(99_999.0, 1e9), (1e9, 10_000.0)])
def test_mooncake_refuses_what_would_break_an_objective(ttft_us: float, tpot_us: float) -> None:
    context = PolicyContext(cost=COST, link=CONTEXT.link, slo_ttft_us=ttft_us, slo_tpot_us=tpot_us)
    asked = query(1_000)
    refusal = Mooncake(context).rank(asked, Candidates(prefills=prefills(0), decodes=decodes(0)), HealthBook())
    assert isinstance(refusal, Refusal)
    assert "predicted" in refusal.reason


def test_dynamo_counts_blocks_left_after_hits_plus_active_blocks() -> None:
    policy = Dynamo(CONTEXT)
    busy = instance("w", Role.AGGREGATED, tokens=320, pages=40)
    assert policy.cost_blocks(query(1_600, {"w": 800}), busy) == (320 + 1_600) / 16 - 800 / 16 + 40
    assert policy.cost_blocks(query(16, {"w": 800}), busy) == 40


@pytest.mark.parametrize(
    ("tokens", "cached", "local"),
    [(6_000, 4_000, True), (6_000, 3_900, False), (2_000, 500, False), (2_000, 700, True)],
)
def test_dynamo_prefills_short_remainders_at_d(tokens: int, cached: int, local: bool) -> None:
    choice = choose(Dynamo(CONTEXT), query(tokens, {"d0": cached}), prefills(0), decodes(0))
    assert names(choice) == ("" if local else "p0", "d0")


@pytest.mark.parametrize(
    ("rows", "cached", "chosen"),
    [
        pytest.param((70, 5), 900, "p1", id="out of balance: fewest requests"),
        pytest.param((60, 5), 900, "p0", id="in balance: the match"),
        pytest.param((60, 5), 300, "p1", id="match of 0.3 is not enough"),
        pytest.param((300, 230), 900, "p0", id="70 apart but less than half as much again"),
    ],
)
def test_sglang_prefers_balance_then_match_then_load(rows: tuple[int, int], cached: int, chosen: str) -> None:
    instances = [instance(f"p{number}", Role.PREFILL, rows=count) for number, count in enumerate(rows)]
    assert sglang_pick(query(1_000, {"p0": cached}), instances).uuid == chosen


@pytest.mark.parametrize(
    ("queued", "cached", "chosen"),
    [
        pytest.param((9_000, 0), 900, "p0", id="0.9 s later than the cold one: stay"),
        pytest.param((12_000, 0), 900, "p1", id="more than T_max later: leave"),
        pytest.param((9_000, 0), 700, "p1", id="no 0.8 of the prompt: shortest queue"),
    ],
)
def test_llm_d_stays_until_saturated(queued: tuple[int, int], cached: int, chosen: str) -> None:
    policy = make_policy("llm-d", CONTEXT)
    assert names(choose(policy, query(1_000, {"p0": cached}), prefills(*queued), decodes(0)))[0] == chosen


@pytest.mark.parametrize(
    ("cached", "waiting", "active", "chosen"),
    [
        pytest.param((0, 480), (0, 0), (0, 9_000), "p1", id="prefix before memory: 3 against 1.8"),
        pytest.param((480, 480), (0, 0), (5_000, 4_000), "p1", id="equal prefixes: free memory"),
        pytest.param((0, 480), (0, 9), (0, 6_000), "p0", id="a queue and memory together outweigh a prefix"),
    ],
)
def test_precise_llm_d_takes_the_highest_weighed_sum_of_scores(
    cached: tuple[int, int], waiting: tuple[int, int], active: tuple[int, int], chosen: str
) -> None:
    pool = prefills(0, 0)
    for each, queue, pages in zip(pool, waiting, active, strict=True):
        each.load = report(each, waiting=queue, pages_active=pages)
    held = {each.uuid: tokens for each, tokens in zip(pool, cached, strict=True) if tokens}
    assert names(choose(make_policy("llm-d-precise", CONTEXT), query(500, held), pool, decodes(0)))[0] == chosen


def test_no_opponent_overfills_a_decode_instance() -> None:
    full = instance("d0", Role.DECODE, pages=9_999)
    for name in ("random", "round-robin", "least-loaded", "mooncake", "dynamo", "sglang", "llm-d", "llm-d-precise"):
        assert choose(make_policy(name, CONTEXT), query(1_000), prefills(0), [full]) is None, name


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known: segue, random"):
        make_policy("best", CONTEXT)
