"""How host and GPU become a step: the order of calls, and where the host waits, decide how much they overlap."""

from dataclasses import replace

import numpy as np
import pytest

from ullage.hardware import gpu
from ullage.performance.alone import StepWork, host_time, times_of, together, utilization_of
from ullage.performance.rates import load
from ullage.performance.step import StepCalls
from ullage.performance.timeline import Launch, Launches

H200 = gpu("H200")
BATCH = {"shape": [16], "dtype": "float32"}
WIDE = {"shape": [8192, 8192], "dtype": "float32"}
COPY, SUM, PRODUCT, NUMBER = range(4)
CALLS = [
    {"operator": "aten._to_copy.default", "args": [BATCH | {"cpu": True}], "kwargs": {}, "outputs": [BATCH]},
    {"operator": "aten.add.Tensor", "args": [BATCH, BATCH], "kwargs": {}, "outputs": [BATCH]},
    {"operator": "aten.mm.default", "args": [WIDE, WIDE], "kwargs": {}, "outputs": [WIDE]},
    {"operator": "aten._local_scalar_dense.default", "args": [BATCH], "kwargs": {}, "outputs": []},
]


def told(*order):
    calls = [{**call, "pass": "forward"} for call in CALLS]
    return utilization_of(StepCalls(calls=calls, order=list(order), steady=True), H200)


def test_long_kernels_at_the_end_of_a_step_are_waited_for():
    """The GPU has nothing to do while the host launches sums; a product in front hides them."""
    sums, products = [SUM] * 3000, [PRODUCT] * 3
    late, early = told(COPY, *sums, *products), told(COPY, *products, *sums)
    assert late.gpu_s == pytest.approx(early.gpu_s) and late.host_s == pytest.approx(early.host_s)
    assert late.step_s > 1.3 * early.step_s
    assert early.step_s >= max(early.gpu_s, early.host_s)


def test_a_host_that_waits_within_a_step_launches_nothing():
    sums, products = [SUM] * 3000, [PRODUCT] * 3
    amid = told(COPY, *products, NUMBER, *sums)
    at_the_end = told(COPY, *products, *sums, NUMBER)
    assert amid.step_s > 1.3 * at_the_end.step_s


def test_a_host_that_never_waits_runs_ahead_into_the_next_step():
    sums, products = [SUM] * 3000, [PRODUCT] * 3
    late, early = told(*sums, *products), told(*products, *sums)
    assert late.step_s == pytest.approx(early.step_s)


def test_where_a_step_is_cut_does_not_matter():
    """It repeats: a step that ends with the wait for a number is the same as one that begins with it."""
    rest = [*[SUM] * 500, PRODUCT, *[SUM] * 500]
    assert told(NUMBER, *rest).step_s == pytest.approx(told(*rest, NUMBER).step_s)


def test_one_launch_after_the_other_on_both_sides():
    """Against the plain rule, call by call."""
    chance = np.random.default_rng(3)
    several = Launches.of(
        {0: Launch("forward add", 0), 7: Launch("forward mm", 1), 9: Launch("forward item", waits=True)},
        chance.choice([0, 5, 7, 9], 400, p=[0.5, 0.2, 0.27, 0.03]).tolist(),
    )
    host, gpu_s = chance.random(len(several.order)), 2 * chance.random(len(several.order))
    launched = free = 0.0
    for place, number in enumerate(several.order):
        launched += host[place]
        free = max(free, launched) + gpu_s[place]
        if several.each[number].waits:
            launched = free = max(launched, free)
    assert several.end(host, gpu_s) == pytest.approx(max(launched, free), rel=1e-4)
    assert several.host_factor(host, gpu_s, several.end(1.7 * host, gpu_s)) == pytest.approx(1.7, rel=0.01)


def test_the_step_has_all_host_work():
    back = {**CALLS[SUM], "pass": "backward"}
    lists = {
        "operator": "aten._foreach_add_.List",
        "pass": "optimizer",
        "args": [[BATCH] * 4, [BATCH] * 4],
        "kwargs": {},
        "outputs": [],
    }
    calls = [*[{**call, "pass": "forward"} for call in CALLS], back, lists, {**CALLS[SUM], "pass": "optimizer"}]
    whole = StepCalls(
        calls=calls, order=[0, 1, 1, 2, 4, 4, 5, 6, 3], steady=True, modules=9, nodes=7, optimizer_steps=1
    )
    for one in (whole, replace(whole, order=[1, 1]), replace(whole, order=[3, 5])):
        work, rates = StepWork.of(one), load()
        spread = work.launches.on_host(rates.host, rates.host_calls, work.host)
        assert spread.sum() == pytest.approx(host_time(rates, work))
        longer = together(rates.with_host(2.0), work, times_of(rates, work), 0.0)
        assert longer == pytest.approx(2 * host_time(rates, work), rel=1e-3)
