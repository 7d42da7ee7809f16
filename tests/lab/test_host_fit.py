"""The host's part of a step: fitted to runs of several machines, by passes and by what each operator takes."""

import json
import random
from dataclasses import replace

import pytest

from ullage.errors import InvalidValue
from ullage.performance.alone import StepWork, host_time
from ullage.performance.rates import load, packed
from ullage.performance.step import StepCalls
from ullage_lab.calls import packed as packed_call
from ullage_lab.train.steps import runs
from ullage_lab.train.steps.host import host_and_step

SMALL = {"shape": [4, 4], "dtype": "float32"}
ALONE = {
    "forward mm": 3e-5,
    "backward mm": 3e-5,
    "forward add": 1e-5,
    "backward add": 1e-5,
    "forward": 1e-5,
    "backward": 1e-5,
}


def call(operator, which):
    return {"operator": f"aten.{operator}", "pass": which, "args": [SMALL, SMALL], "kwargs": {}, "outputs": [SMALL]}


def made_up(number, machine, factor, with_passes):
    """A run whose calls take twice as long as alone going forward, and three times as long going back."""
    chance = random.Random(number)
    calls = [call(name, which) for which in ("forward", "backward") for name in ("mm.default", "add.Tensor")]
    counts = [chance.randint(20, 200) for _ in calls]
    order = [place for place, count in enumerate(counts) for _ in range(count)]
    modules, nodes = chance.randint(5, 200), chance.randint(20, 300)
    step = StepCalls(calls=calls, order=order, steady=True, modules=modules, nodes=nodes, optimizer_steps=1)
    forward = 2e-4 + 8e-6 * modules + 2 * (3e-5 * counts[0] + 1e-5 * counts[1])
    backward = 2e-4 + 1e-5 * nodes + 3 * (3e-5 * counts[2] + 1e-5 * counts[3])
    forward, backward, host = factor * forward, factor * backward, factor * (forward + backward + 3e-4)
    return runs.FollowedRun(
        id=f"{machine}-{number}",
        family=f"family {number}",
        kind="mlp",
        is_test=False,
        machine=machine,
        step_s=host,
        gpu_s=0.05 * host,
        host_s=host,
        shares={},
        power_w=100.0,
        work=StepWork.of(step),
        host_passes=(forward, backward) if with_passes else None,
    )


def test_operator_and_pass_times_are_fitted_to_all_machines():
    """The first machine has few runs and no passes: the others say what a step is made of."""
    first = [made_up(number, "first", 1.0, False) for number in range(30)]
    others = [made_up(number, "slow", 1.7, True) for number in range(100, 128)]
    rates = host_and_step(load(), first + others, ALONE)
    for number in range(200, 220):
        run = made_up(number, "first", 1.0, False)
        assert host_time(rates, run.work) == pytest.approx(run.host_s, rel=0.05)
    assert rates.host_calls["forward mm"] == pytest.approx(6e-5, rel=0.15)
    assert rates.host_calls["backward add"] == pytest.approx(3e-5, rel=0.15)
    slower = rates.with_host(1.7)
    assert host_time(slower, others[0].work) == pytest.approx(others[0].host_s, rel=0.05)


def test_an_unknown_operator_needs_the_usual_memory():
    step = StepCalls(calls=[call("frobnicate.default", "backward")], order=[0] * 7, steady=True)
    rates = replace(load(), host={}, host_calls={"backward": 1e-3, "forward": 1.0, "backward mm": 5.0})
    assert host_time(rates, StepWork.of(step)) == pytest.approx(7e-3)


def test_single_calls_and_profiles_give_host_time_per_operator(tmp_path):
    """Of the machine with most calls; of profiles, none of a family for testing."""
    lines = [{"machine": {"uuid": "a"}}, *({"operator": "aten.mm.default", "host_us": 20.0} for _ in range(3))]
    other = [{"machine": {"uuid": "b"}}, {"operator": "aten.mm.default", "host_us": 90.0}]
    for name, several in (("a", lines), ("b", other)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in several))
    names = ["aten::mm", "aten::add"]
    calls = {"name": [0] * 6 + [1] * 6, "taken": [120_000] * 6 + [30_000] * 6, "thread": [1] * 12}
    profile = {"id": "p", "model": "timm:swin_tiny_patch4_window7_224", "names": names, "calls": calls}
    tested = {**profile, "id": "q", "model": "hf:GemmaForCausalLM", "calls": {**calls, "taken": [10**9] * 12}}
    (tmp_path / "profiles.jsonl").write_text(json.dumps(profile) + "\n" + (json.dumps(tested) + "\n") * 3)
    found = runs.calls_on_host([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "profiles.jsonl")
    assert found["backward mm"] == pytest.approx(3e-5)  # between 20 us alone and a third of 120 us
    assert found["backward add"] == found["forward add"] == pytest.approx(1e-5)
    assert found["forward"] > 0


def test_grouped_convolutions_are_fitted_alone_on_all_machines(tmp_path):
    """The second machine takes half as long for all; only it has timed convolutions with groups."""

    def timed(groups, taken):
        weight = {"shape": [8, 8 // groups, 3, 3], "dtype": "float32"}
        source = {"shape": [2, 8, 9, 9], "dtype": "float32"}
        args = [source, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups]
        made = {"operator": "aten.convolution.default", "args": args, "kwargs": {}, "outputs": [source]}
        return {"operator": "aten.convolution.default", "host_us": taken, "call": packed_call(made)}

    lines = {
        "a": [{"machine": {"uuid": "a"}}, *[timed(1, 40.0)] * 9, {"operator": "aten.mm.default", "host_us": 20.0}],
        "b": [{"machine": {"uuid": "b"}}, timed(1, 20.0), timed(8, 10.0), timed(2, 30.0)],
    }
    for name, several in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in several))
    found = runs.calls_on_host([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], None)
    assert found["forward convolution"] == pytest.approx(4e-5)
    assert found["forward convolution depthwise"] == pytest.approx(2e-5)
    assert found["backward convolution grouped"] == pytest.approx(6e-5)


def test_rates_of_another_release_are_refused(tmp_path):
    (tmp_path / "rates.safetensors").write_bytes(packed(replace(load(), host={"step": 1e-3, "views": 1e-6})))
    with pytest.raises(InvalidValue, match="another version of Ullage"):
        load(tmp_path / "rates.safetensors")
