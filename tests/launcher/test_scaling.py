"""What an order to scale starts and retires, when it is over, and which orders are refused."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from launcher.scaling import Action, Answer, Forget, Retire, Scaling, Start
from segue.limits import INSTANCES_MAX
from segue.manifest import Role
from segue.pool_messages import InstanceChange, InstanceState, ScaleDone, ScaleOrder, ScaleRefused

PAIR = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


def order(pool: str, instances: int, op: int = 1) -> ScaleOrder:
    return ScaleOrder(op=op, pool=pool, instances=instances)


def serving(roles: dict[str, Role] | None = None) -> Scaling:
    scaling = Scaling(roles or PAIR)
    for name in roles or PAIR:
        scaling.note(name, InstanceState.READY)
    return scaling


def answers(actions: list[Action]) -> list[object]:
    return [action.answer for action in actions if isinstance(action, Answer)]


def started(actions: list[Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, Start)]


def retired(actions: list[Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, Retire)]


def grown(instances: int = 3) -> Scaling:
    scaling = serving()
    for name in started(scaling.take(order("decode", instances))):
        scaling.note(name, InstanceState.READY)
    return scaling


def test_growing_starts_the_missing_and_ends_when_all_serve() -> None:
    scaling = serving()
    assert started(scaling.take(order("decode", 3))) == ["decode-1", "decode-2"]
    assert answers(scaling.note("decode-2", InstanceState.READY)) == [InstanceChange("decode-2", InstanceState.READY)]
    assert answers(scaling.note("decode-1", InstanceState.READY))[-1] == ScaleDone(3)


def test_the_other_pool_is_left_alone() -> None:
    scaling = serving()
    actions = scaling.take(order("prefill", 2))
    assert started(actions) == ["prefill-1"]
    assert scaling.members(Role.DECODE) == ["decode-0"]


def test_shrinking_retires_the_last_ones_and_ends_when_they_are_gone() -> None:
    scaling = grown()
    assert retired(scaling.take(order("decode", 1))) == ["decode-2", "decode-1"]
    scaling.note("decode-1", InstanceState.GONE)
    assert answers(scaling.note("decode-2", InstanceState.GONE))[-1] == ScaleDone(1)
    assert list(scaling.roles()) == ["prefill-0", "decode-0"]


def test_one_that_does_not_serve_yet_goes_before_one_that_does() -> None:
    scaling = serving()
    scaling.take(order("decode", 3))
    scaling.note("decode-2", InstanceState.READY)
    assert retired(scaling.take(order("decode", 2))) == ["decode-1"]


def test_size_that_the_pool_has_is_done_at_once() -> None:
    assert answers(serving().take(order("decode", 1))) == [ScaleDone(1)]


def test_later_order_replaces_the_one_before() -> None:
    scaling = serving()
    scaling.take(order("decode", 3, op=1))
    actions = scaling.take(order("decode", 2, op=2))
    [replaced] = [action.answer for action in actions if isinstance(action, Answer) and action.op == 1]
    assert isinstance(replaced, ScaleRefused) and "replaced by a later order" in replaced.reason
    scaling.note("decode-2", InstanceState.GONE)
    assert scaling.note("decode-1", InstanceState.READY)[-1] == Answer(2, ScaleDone(2))


def test_name_of_a_draining_instance_is_not_used_again() -> None:
    scaling = grown(2)
    scaling.take(order("decode", 1))
    assert started(scaling.take(order("decode", 2))) == ["decode-2"]


def test_instance_that_is_given_up_ends_the_order_with_what_serves() -> None:
    scaling = serving()
    scaling.take(order("decode", 2))
    assert answers(scaling.note("decode-1", InstanceState.FAILED, "no memory")) == [
        InstanceChange("decode-1", InstanceState.FAILED, "no memory"),
        ScaleDone(1),
    ]


def test_the_next_order_tries_again_what_was_given_up() -> None:
    scaling = serving()
    scaling.take(order("decode", 2))
    scaling.note("decode-1", InstanceState.FAILED)
    actions = scaling.take(order("decode", 2))
    assert Forget("decode-1") in actions
    assert started(actions) == ["decode-1"]


@pytest.mark.parametrize(
    ("pool", "instances", "field", "reason"),
    [
        ("encode", 1, "pool", "'encode' is no pool: known are prefill, decode"),
        ("aggregated", 1, "pool", "'aggregated' is no pool: known are prefill, decode"),
        ("decode", 0, "instances", "without a decode instance no request could be served"),
        ("prefill", 0, "instances", "without a prefill instance no request could be served"),
        ("decode", INSTANCES_MAX, "instances", f"a cluster has at most {INSTANCES_MAX}"),
    ],
)
def test_impossible_order_is_refused_and_changes_nothing(pool: str, instances: int, field: str, reason: str) -> None:
    scaling = serving()
    [refused] = answers(scaling.take(order(pool, instances)))
    assert isinstance(refused, ScaleRefused)
    assert refused.field == field
    assert reason in refused.reason
    assert scaling.roles() == PAIR


def test_largest_allowed_cluster_is_allowed() -> None:
    assert len(started(serving().take(order("decode", INSTANCES_MAX - 1)))) == INSTANCES_MAX - 2


def test_pool_of_an_aggregated_cluster_is_refused() -> None:
    [refused] = answers(serving({"aggregated-0": Role.AGGREGATED}).take(order("decode", 2)))
    assert isinstance(refused, ScaleRefused)
    assert "its instances are aggregated" in refused.reason


class AnyOrders(RuleBasedStateMachine):
    """Against a model: the wanted sizes, and which processes run."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = serving()
        self.running = dict.fromkeys(PAIR, "ready")
        self.wanted = {Role.PREFILL: 1, Role.DECODE: 1}
        self.ops = 0
        self.open: dict[Role, int] = {}
        self.ended: list[int] = []

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(name=name):
                    assert name not in self.running
                    self.running[name] = "starting"
                case Retire(name=name):
                    assert self.running[name] in ("starting", "ready")
                    self.running[name] = "draining"
                case Forget(name=name):
                    assert self.running.pop(name) == "failed"
                case Answer(op=op, answer=ScaleDone() | ScaleRefused()):
                    self.ended.append(op)
                    self.open = {role: own for role, own in self.open.items() if own != op}

    @rule(role=st.sampled_from([Role.PREFILL, Role.DECODE]), instances=st.integers(1, 5))
    def asks(self, role: Role, instances: int) -> None:
        self.ops += 1
        self.wanted[role], self.open[role] = instances, self.ops
        self.carry_out(self.scaling.take(order(role.value, instances, self.ops)))

    def named(self, *states: str) -> list[str]:
        return sorted(name for name, state in self.running.items() if state in states)

    @precondition(lambda self: self.named("starting"))
    @rule(data=st.data(), fails=st.booleans())
    def starts(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(self.named("starting")))
        self.running[name] = "failed" if fails else "ready"
        state = InstanceState.FAILED if fails else InstanceState.READY
        self.carry_out(self.scaling.note(name, state))

    @precondition(lambda self: self.named("draining"))
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.named("draining")))
        del self.running[name]
        self.carry_out(self.scaling.note(name, InstanceState.GONE))

    @precondition(lambda self: self.named("ready"))
    @rule(data=st.data())
    def dies_and_starts_again(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.named("ready")))
        self.running[name] = "starting"
        self.carry_out(self.scaling.note(name, InstanceState.STARTING))

    @invariant()
    def pools_have_the_wanted_sizes(self) -> None:
        for role, wanted in self.wanted.items():
            own = [name for name in self.named("starting", "ready", "failed") if name.startswith(role.value)]
            assert len(own) == wanted

    @invariant()
    def every_order_ends_exactly_once_and_no_earlier_than_its_pool_is_settled(self) -> None:
        assert len(set(self.ended)) == len(self.ended)
        for role in self.wanted:
            unsettled = [name for name in self.named("starting", "draining") if name.startswith(role.value)]
            if not unsettled:
                assert role not in self.open


TestAnyOrders = AnyOrders.TestCase
TestAnyOrders.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
