"""`segue plan` as typed: the best split by simulation, the runner-up, the reason, errors that say what to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import simulator.planning
from launcher.cli import app
from simulator.hardware import Instance
from simulator.planning import Split, first_guess, instance_sizes, ranked, simulate_split
from simulator.report import Slo
from simulator.workload import Workload, WorkloadRequest

TRACE = Path(__file__).parent.parent / "data" / "conversation_60.jsonl"
INSTANCE = Instance(model="llama3-70b", node="h200", weights="fp8", kv="fp8")
SMALL = Instance(model="llama3.1-8b", node="h200", accelerators=1, weights="fp8", kv="fp8")


def plan(*arguments: str, trace: Path = TRACE) -> Result:
    return CliRunner().invoke(app, ["plan", "--trace", str(trace), *arguments])


def steady(prompt: int, output: int, every_us: int, count: int = 40) -> Workload:
    requests = [WorkloadRequest(number * every_us, prompt, output) for number in range(count)]
    return Workload(name="steady", requests=requests)


def test_the_best_split_the_runner_up_and_the_reason_are_told(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = plan("--model", "llama3.1-8b", "--gpus", "3", "--count", "20", "--json", str(out))
    assert result.exit_code == 0, result.output
    told = json.loads(out.read_text())
    assert told["complete"] and told["trials"][:2] == [told["best"], told["runner_up"]]
    shares = [round(trial["summary"]["attainment"], 3) for trial in told["trials"]]
    assert shares == sorted(shares, reverse=True) and len(shares) == 3
    assert "best: " in result.stdout and told["best"]["reason"] in " ".join(result.stdout.split())
    assert told["left_out"] == [{"accelerators": 2, "reason": "3 accelerators are not a multiple of 2"}]


def test_long_prompts_get_prefill_instances_and_long_answers_decode_instances() -> None:
    assert first_guess(SMALL, 8, steady(30_000, 10, 100_000)) == 7
    assert first_guess(SMALL, 8, steady(100, 2_000, 100_000)) == 1


def test_the_search_leaves_a_guess_that_is_worse_than_its_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = steady(12_000, 8, 120_000)
    tried: list[int] = []
    monkeypatch.setattr(simulator.planning, "first_guess", lambda *_: 1)
    slo = Slo(ttft_us=600_000.0, ttft_factor=0.0)
    simulator.planning.search(workload, [SMALL], 5, slo, "segue", lambda trial: tried.append(trial.split.prefill))
    assert tried[0] == 0 and {1, 2, 3} <= set(tried)


@pytest.mark.parametrize(
    ("workload", "split", "tpot_us", "reason"),
    [
        (steady(12_000, 8, 50_000), (1, 2), 50_000.0, "prefill saturates"),
        (steady(200, 400, 10_000), (2, 1), 1_000.0, "decode saturates: its steps"),
        (steady(200, 8, 1_000_000), (1, 1), 50_000.0, "both objectives kept; room to spare"),
    ],
)
def test_the_reason_names_what_is_busy(workload: Workload, split: tuple[int, int], tpot_us: float, reason: str) -> None:
    slo = Slo(ttft_us=300_000.0, ttft_factor=0.0, tpot_us=tpot_us)
    trial = simulate_split(workload, SMALL, Split(1, *split), slo, "least-loaded")
    assert reason in trial.reason


def test_the_policy_weighs_latencies_by_the_objectives_that_were_given() -> None:
    slo = Slo(ttft_us=7e6, ttft_factor=0.0, tpot_us=20_000.0)
    targets = simulator.planning.split_spec(steady(100, 5, 1_000), SMALL, Split(1, 1, 1), slo).targets
    assert (targets.ttft_us, targets.ttft_factor, targets.tpot_us) == (7e6, 0.0, 20_000.0)


def test_a_split_that_completes_nothing_comes_last_and_says_so() -> None:
    workload, slo = steady(100, 5, 1_000), Slo()
    useless = simulate_split(workload, SMALL, Split(1, 0, 0, 1), slo, "mooncake")
    slow = simulate_split(workload, SMALL, Split(1, 1, 1), Slo(ttft_us=1.0, ttft_factor=0.0), "random")
    assert useless.reason == "no request was completed, 40 were rejected"
    assert ranked([useless, slow], slo) == [slow, useless]


def test_an_instance_needs_room_for_weights_and_the_longest_request() -> None:
    sizes, left_out = instance_sizes(INSTANCE, 8, tokens_longest=2_000_000)
    assert [each.accelerators for each in sizes] == [4, 8]
    assert "the longest request has 2,000,000 tokens" in left_out[1]


def test_what_was_tried_before_an_interruption_is_kept_and_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = simulate_split, []

    def interrupted(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return honest(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(simulator.planning, "simulate_split", interrupted)
    out = tmp_path / "plan.json"
    result = plan("--model", "llama3.1-8b", "--gpus", "2", "--count", "5", "--json", str(out))
    assert result.exit_code == 130
    told = json.loads(out.read_text())
    assert (told["complete"], len(told["trials"]), told["runner_up"]) == (False, 1, None)
    assert "ended early" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--gpus", "0"], "at least one accelerator"),
        (["--gpus", "4", "--slo", "speed=1"], "'speed=1' is not NAME=VALUE"),
        (["--gpus", "4", "--slo", "ttft=nan"], "not a number"),
        (["--gpus", "4", "--slo", "ttft=0"], "'ttft=0' "),
        (["--gpus", "4", "--model", "gpt"], "unknown model 'gpt'"),
        (["--gpus", "4", "--hardware", "abacus"], "unknown hardware 'abacus'"),
        (["--gpus", "1", "--weights", "bf16"], "does not fit 1 accelerators"),
        (["--gpus", "1", "--kv", "fp4"], "unknown type 'fp4'"),
        (["--gpus", "4", "--policy", "segue,random"], "one of them"),
        (["--gpus", "4", "--policy", "best"], "unknown policy 'best'"),
        (["--gpus", "4", "--count", "-1"], "--count: -1 is less than 0"),
        (["--gpus", "4", "--json", "no/such/folder/plan.json"], "No such file or directory"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_reason(arguments: list[str], complaint: str) -> None:
    result = plan(*arguments)
    assert result.exit_code == 2, result.output
    assert complaint in " ".join(result.stderr.split())
