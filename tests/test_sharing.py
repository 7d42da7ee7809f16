"""Jobs together on a GPU: what must hold whatever was measured."""

import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest

from ullage.errors import InvalidValue, UnknownName
from ullage.hardware import gpu
from ullage.performance.alone import groups_of, parts_of, utilization_of
from ullage.performance.result import KernelGroup, Utilization
from ullage.performance.sharing import Sharing, load, share_of
from ullage.performance.step import StepCalls
from ullage.performance.work import work_of

H200 = gpu("H200")
WAYS = ("mps", "time-slicing", "mig")


def job(**known: float) -> Utilization:
    step_s = known.pop("step_s", 0.02)
    values = {"gpu_s": 0.3 * step_s, "smact": 0.2, "smocc": 0.1, "drama": 0.05, "waits": 2, "kernels": 300} | known
    rest = {"tensor": 0.0, "power_w": 200.0, "energy_j": 200.0 * step_s, "flops": 1e9, "bytes": 1e8}
    return Utilization(gpu="H200", step_s=step_s, host_s=step_s, **rest, **values, steady=True, measured=True)


def drawn(chance: random.Random) -> Utilization:
    busy, step_s = chance.random(), 10 ** chance.uniform(-3, 0)
    smact = busy * chance.random()
    waits = chance.choice([0, 1, 2, 3, 40, 300])
    kernels = chance.choice([0, 1, 30, 1000])
    known = {"smact": smact, "drama": smact * chance.random(), "waits": waits, "kernels": kernels}
    known["copy_s"] = chance.choice([0.0, 0.1, 0.5, 2.0]) * step_s
    return job(step_s=step_s, gpu_s=busy * step_s, **known)


FULL = job(gpu_s=0.02, smact=0.95, drama=0.4)


@pytest.mark.parametrize("way", ("mps", "time-slicing"))
def test_a_job_alone_keeps_its_speed(way: str) -> None:
    for number in range(50):
        one = drawn(random.Random(number))
        together = share_of([one], H200, way)
        assert together.jobs[0].speed == pytest.approx(1)
        assert together.throughput == pytest.approx(1) == together.energy
        assert together.power_w == pytest.approx(one.power_w)


@pytest.mark.parametrize("way", ("mps", "time-slicing"))
def test_a_further_job_makes_no_other_one_faster(way: str) -> None:
    chance = random.Random(way)
    for _ in range(60):
        jobs = [drawn(chance) for _ in range(chance.randint(2, 6))]
        more, fewer = share_of(jobs, H200, way), share_of(jobs[:-1], H200, way)
        for crowded, free in zip(more.jobs, fewer.jobs, strict=False):
            assert crowded.speed <= free.speed + 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_speeds_and_throughput_have_their_bounds(way: str) -> None:
    chance = random.Random(way)
    for _ in range(60):
        jobs = [drawn(chance) for _ in range(chance.randint(2, 7))]
        together = share_of(jobs, H200, way)
        assert all(0 < one.speed <= 1 for one in together.jobs)
        assert together.throughput == pytest.approx(sum(one.speed for one in together.jobs))
        assert together.throughput <= len(jobs)


@pytest.mark.parametrize("way", WAYS)
def test_the_order_of_jobs_does_not_matter(way: str) -> None:
    chance = random.Random(way)
    jobs = [drawn(chance) for _ in range(3)]
    speeds = []
    for order in itertools.permutations(range(3)):
        found = share_of([jobs[place] for place in order], H200, way).jobs
        speeds.append([found[order.index(place)].speed for place in range(3)])
    assert all(one == pytest.approx(speeds[0], rel=1e-4) for one in speeds)


@pytest.mark.parametrize("way", ("mps", "time-slicing"))
def test_a_busier_partner_leaves_less_speed(way: str) -> None:
    one = job(gpu_s=0.012, smact=0.5)
    shares = [0.1, 0.4, 0.7, 1.0]
    partners = [job(gpu_s=share * 0.02, smact=0.9 * share) for share in shares]
    speeds = [share_of([one, partner], H200, way).jobs[0].speed for partner in partners]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > speeds[-1] + 0.1


@pytest.mark.parametrize("way", ("mps", "time-slicing"))
def test_two_jobs_that_fill_the_gpu_do_no_more_than_in_sequence(way: str) -> None:
    together = share_of([FULL, FULL], H200, way)
    assert 0.75 < together.throughput < 1.1
    assert "want" in together.reason


def test_jobs_that_wait_for_their_hosts_share_well() -> None:
    together = share_of([job(), job(), job()], H200, "mps")
    assert together.slowest > 0.9 and together.throughput > 2.7 and together.energy < 0.8
    assert "host" in together.reason and "host" in together.jobs[0].reason


def test_time_slicing_costs_a_job_that_asks_for_single_numbers() -> None:
    """Adafactor asks the GPU for a number of each parameter; each time the other processes have their turns."""
    asking, partner = job(waits=80), job(gpu_s=0.018, smact=0.6)
    sliced, side_by_side = share_of([asking, partner], H200, "time-slicing"), share_of([asking, partner], H200, "mps")
    assert sliced.jobs[0].speed < 0.5 < side_by_side.jobs[0].speed
    assert "waits for the GPU 80 times" in sliced.jobs[0].reason


def test_short_kernels_suffer_next_to_long_ones() -> None:
    """Under MPS a kernel waits for those that came before it, as far as they fill the SMs."""
    short, long = (job(gpu_s=0.016, smact=0.6, kernels=kernels) for kernels in (2000, 40))
    mixed = share_of([short, long], H200, "mps").jobs
    assert mixed[0].speed < mixed[1].speed
    assert mixed[0].speed < share_of([short, short], H200, "mps").jobs[0].speed


def grouped(*groups: tuple[float, float, float]) -> Utilization:
    """A job that keeps the GPU busy with kernels of which so many take so many seconds and fill so much of the SMs."""
    gpu_s = sum(count * each for count, each, _ in groups)
    smact = sum(count * each * fill for count, each, fill in groups) / gpu_s
    kernels = [KernelGroup(count, count * each, count * each * fill) for count, each, fill in groups]
    return job(
        step_s=gpu_s,
        gpu_s=gpu_s,
        smact=smact,
        kernels=int(sum(kernel.number for kernel in kernels)),
        kernel_groups=kernels,
    )


def test_a_kernel_waits_for_those_that_fill_the_gpu() -> None:
    """Of two partners that are as busy on average, one fills some SMs always, the other all at times."""
    one = grouped((200, 1e-4, 0.9))
    even, uneven = grouped((200, 1e-4, 0.35)), grouped((70, 1e-4, 0.99), (130, 1e-4, 0.005))
    assert even.smact == pytest.approx(uneven.smact, rel=0.01)
    beside = [share_of([one, partner], H200, "mps").jobs[0].speed for partner in (even, uneven)]
    assert beside[1] < beside[0] - 0.05


def test_short_kernels_pass_between_long_ones() -> None:
    """As many kernels wait less where the other job leaves gaps."""
    short = grouped((2000, 1e-5, 0.9))
    tight, loose = grouped((100, 2e-4, 0.99)), grouped((100, 2e-4, 0.99), (100, 2e-4, 0.1))
    beside = [share_of([short, partner], H200, "mps").jobs[0].speed for partner in (tight, loose)]
    assert beside[0] < beside[1]


@pytest.mark.parametrize(
    "group", [(0.0, 1.0, 1.0), (1e-300, 1e-300, 1e-300), (1e24, 1e-300, 0.0), (1.0, 0.0, 0.0), (1.0, 1e-3, 1e24)]
)
def test_kernels_that_cannot_be_do_no_harm(group: tuple[float, float, float]) -> None:
    """A user's process may have said anything."""
    together = share_of([job(kernel_groups=[KernelGroup(*group)]), FULL, FULL], H200, "mps")
    assert all(0 < one.speed <= 1 for one in together.jobs)


def test_third_jobs_close_the_gaps() -> None:
    """In which short kernels pass beside one other job."""
    jobs = [grouped((2000, 1e-5, 0.9)), *[grouped((100, 2e-4, 0.99), (100, 2e-4, 0.1))] * 2]
    open_ = replace(load(), closing=0.0)
    for count in (2, 3):
        with_gaps, as_it_is = (share_of(jobs[:count], H200, "mps", rules=rules).jobs[0] for rules in (open_, load()))
        assert with_gaps.speed > as_it_is.speed if count > 2 else with_gaps == as_it_is


def test_jobs_are_as_busy_as_given_whatever_their_kernels() -> None:
    one = grouped((200, 1e-4, 0.9), (300, 1e-5, 0.2))
    longer = [KernelGroup(kernel.number, 3 * kernel.seconds, 3 * kernel.filled) for kernel in one.kernel_groups]
    found = [share_of([each, FULL], H200, "mps").slowest for each in (one, replace(one, kernel_groups=longer))]
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def convolution(operator: str, groups: int = 1) -> dict:
    image, weight = (
        {"shape": [32, 64, 56, 56], "dtype": "float32"},
        {"shape": [64, 64 // groups, 3, 3], "dtype": "float32"},
    )
    rest = [[1, 1], [1, 1], [1, 1], False, [0, 0], groups]
    if operator == "convolution":
        return {
            "operator": "aten.convolution.default",
            "args": [image, weight, None, *rest],
            "kwargs": {},
            "outputs": [image],
        }
    args = [image, image, weight, [0], *rest, [True, True, False]]
    return {
        "operator": "aten.convolution_backward.default",
        "args": args,
        "kwargs": {},
        "outputs": [image, weight, None],
    }


def test_convolutions_are_several_kernels() -> None:
    calls = [convolution(name, groups) for name in ("convolution", "convolution_backward") for groups in (1, 64)]
    works = [work_of(call) for call in calls]
    several = [parts_of(work) for work in works]
    assert all(sum(parts) == pytest.approx(1, abs=0.02) and len(parts) > 1 for parts in several)
    found = utilization_of(StepCalls(calls=calls, order=[0, 1, 2, 3, 3], steady=True), H200)
    counts = [len(parts) for parts in several]
    assert sum(group.number for group in found.kernel_groups) == sum(counts) + counts[3] and found.kernels == 5
    assert sum(group.seconds for group in found.kernel_groups) == pytest.approx(found.gpu_s, rel=0.02)
    assert Utilization.from_dict(json.loads(found.to_json())) == found


def test_lists_take_as_many_kernels_as_their_tensors_need() -> None:
    def of(tensors: int, numbers: int) -> int:
        parameters = [{"shape": [numbers], "dtype": "float32"}] * tensors
        call = {"operator": "aten._foreach_add_.List", "args": [parameters, parameters], "kwargs": {}, "outputs": []}
        return len(parts_of(work_of(call)))

    assert of(4, 100) == 1 < of(400, 100) and of(4, 100) < of(4, 50_000_000)


def test_a_step_without_kernels_has_no_groups() -> None:
    assert groups_of([], np.zeros(0), np.zeros(0), np.zeros(0)) == []


def test_a_mig_instance_is_not_slowed_by_neighbours() -> None:
    pairs = [share_of([FULL, partner], H200, "mig") for partner in (FULL, job())]
    assert pairs[0].profile == "3g.71gb" and pairs[0].jobs[0] == pairs[1].jobs[0]
    assert pairs[1].jobs[1].speed > 0.9 > 0.6 > pairs[0].jobs[0].speed > 60 / 132 - 0.05
    assert "instance" in pairs[0].jobs[0].reason
    seven = share_of([job()] * 7, H200, "mig")
    assert seven.profile == "1g.18gb"
    assert share_of([job()] * 2, H200, "mig:2g.35gb").profile == "2g.35gb"


def test_memory_fits_together_or_into_each_instance() -> None:
    pair, gib = [job(), job()], 2**30
    assert share_of(pair, H200).fits is None
    assert share_of(pair, H200, memory=[100 * gib, 20 * gib]).fits is True
    assert share_of(pair, H200, memory=[100 * gib, 60 * gib]).fits is False
    assert share_of(pair, H200, "mig", memory=[100 * gib, 20 * gib]).fits is False
    assert [one.memory for one in share_of(pair, H200, memory=[3 * gib, 4 * gib]).jobs] == [3 * gib, 4 * gib]


def test_mistakes_are_refused() -> None:
    with pytest.raises(UnknownName, match="no way of sharing named 'msp'; did you mean 'mps'"):
        share_of([FULL], H200, "msp")
    with pytest.raises(UnknownName, match="no MIG instance of H200 named '3g.20gb'"):
        share_of([FULL], H200, "mig:3g.20gb")
    with pytest.raises(InvalidValue, match="T4 has no MIG instances"):
        share_of([FULL, FULL], gpu("T4"), "mig")
    with pytest.raises(InvalidValue, match="H200 has 2 instances 3g.71gb; 3 jobs need one each"):
        share_of([FULL] * 3, H200, "mig:3g.71gb")
    with pytest.raises(InvalidValue, match="at most 7 MIG instances; 8 jobs need one each"):
        share_of([FULL] * 8, H200, "mig")
    with pytest.raises(InvalidValue, match="got none"):
        share_of([], H200)
    with pytest.raises(InvalidValue, match="memory must have 2 figures, one for each job, got 1"):
        share_of([FULL, FULL], H200, memory=[1])


def test_a_sharing_is_read_back() -> None:
    together = share_of([job(), FULL], H200, "time-slicing", memory=[1, 2])
    assert Sharing.from_dict(together.to_dict() | {"later": 1}) == together
    with pytest.raises(InvalidValue, match="the sharing must have gpu, how"):
        Sharing.from_dict({"jobs": []})


def test_figures_that_cannot_be_read_are_named(tmp_path) -> None:
    (tmp_path / "sharing.json").write_text("{}")
    with pytest.raises(InvalidValue, match="cannot read the figures of sharing in .*ullage lab train sharing"):
        load(tmp_path / "sharing.json")


@pytest.mark.parametrize("way", WAYS)
def test_host_copies_are_not_hidden_by_other_jobs(way: str) -> None:
    """Of two jobs that are as busy, the one whose host copies meanwhile has nothing else to do while the GPU works."""
    launching, copying = job(gpu_s=0.014, smact=0.6), job(gpu_s=0.014, smact=0.6, copy_s=0.005)
    others = [FULL] * (1 if way != "mig" else 6)
    speeds = [share_of([one, *others], H200, way).jobs[0].speed for one in (launching, copying)]
    assert speeds[1] < speeds[0] < 1
    assert share_of([job(copy_s=1.0)], H200, way).jobs[0].speed <= 1  # more than a step has


def test_rules_can_be_given() -> None:
    free = replace(load(), contention=0.0, crowding=0.0)
    assert share_of([FULL, FULL], H200, "mps", rules=free).slowest == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kernel_groups", [[1, 2]]),
        ("kernel_groups", 5),
        ("kernel_groups", [["a", 1, 2]]),
        ("step_s", "a"),
        ("waits", None),
    ],
)
def test_a_wrong_value_is_one_message(name, value):
    good = job().to_dict()
    assert Utilization.from_dict(good) == job()
    with pytest.raises(InvalidValue, match="invalid utilization: .* must be"):
        Utilization.from_dict(good | {name: value})
