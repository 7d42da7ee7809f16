"""A job alone on a GPU: what makes its step longer, and the fit of the rates behind it."""

import gzip
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from tests.commands import ullage

from ullage.errors import InvalidValue
from ullage.hardware import gpu
from ullage.performance.alone import StepWork, utilization_of, utilization_of_work
from ullage.performance.rates import load, packed
from ullage.performance.step import StepCalls
from ullage_lab.clean.schema import frame
from ullage_lab.train.steps import fitting, judging, runs

H200 = gpu("H200")


def tensor(*shape, dtype="float32", **more):
    return {"shape": list(shape), "dtype": dtype, **more}


def call(operator, args, outputs, **more):
    return {"operator": operator, "pass": "forward", "args": args, "kwargs": {}, "outputs": outputs, **more}


def product(rows, dtype="float32", **more):
    return call(
        "aten.mm.default",
        [tensor(rows, 2048, dtype=dtype), tensor(2048, 2048, dtype=dtype)],
        [tensor(rows, 2048, dtype=dtype)],
        **more,
    )


def step(*calls, times=20):
    return StepCalls(calls=list(calls), order=list(range(len(calls))) * times, steady=True)


def alone(*calls, card=H200, times=20):
    return utilization_of(step(*calls, times=times), card)


def test_more_work_takes_longer():
    small, large = alone(product(1024)), alone(product(8192))
    assert large.gpu_s > 3 * small.gpu_s and large.step_s > small.step_s
    assert large.flops == 8 * small.flops


def test_kernels_of_libraries_are_found_cold_before_each_call():
    work, sums = StepWork.of(step(product(64), times=20)), StepWork.of(step(call("aten.exp.default", [tensor(9)], [])))
    rates = replace(load(), gap_s=1e-6, gaps={})
    cold = replace(rates, gaps={"product": 3e-6})
    longer = utilization_of_work(work, H200, cold).gpu_s - utilization_of_work(work, H200, rates).gpu_s
    assert longer == pytest.approx(20 * 2e-6)
    assert utilization_of_work(sums, H200, cold).gpu_s == utilization_of_work(sums, H200, rates).gpu_s


def test_the_types_of_numbers_matter():
    plain, tf32, half = alone(product(8192)), alone(product(8192, tf32=True)), alone(product(8192, dtype="bfloat16"))
    assert plain.gpu_s > tf32.gpu_s > half.gpu_s
    assert half.tensor > plain.tensor


def test_compiled_kernels_take_as_long_as_their_operators():
    """One that works on each number by itself as a sum of two tensors, one that sums up as a sum of numbers."""
    wide, narrow = tensor(4, 768, 1536), tensor(4, 768, 1536, dtype="bfloat16")
    written = alone(call("triton.triton_poi_fused__to_copy_4", [wide, narrow, 4718592], []))
    assert written.gpu_s == pytest.approx(alone(call("aten.add.Tensor", [wide], [narrow])).gpu_s)
    summed = alone(call("triton.triton_red_fused_sum_3", [wide, tensor(4, 768), 3072, 1536], []))
    assert summed.gpu_s == pytest.approx(alone(call("aten.sum.dim_IntList", [wide], [tensor(4, 768)])).gpu_s)


def test_interpolation_of_small_images_loops_over_samples():
    """PyTorch's kernel has a thread for each place: more channels take longer, and most SMs have nothing to do."""

    def enlarged(channels, side, **more):
        given, made = tensor(64, channels, side, side, **more), tensor(64, channels, 2 * side, 2 * side)
        return alone(call("aten.upsample_bilinear2d.default", [given, [2 * side] * 2, False, 2.0, 2.0], [made]))

    few, many, large = enlarged(256, 7), enlarged(1024, 7), enlarged(64, 28)
    assert many.gpu_s == pytest.approx(4 * few.gpu_s, rel=0.02)
    assert many.smact < 0.02 and many.smocc < 0.02
    assert large.gpu_s < many.gpu_s / 8  # as many numbers
    channels_last = enlarged(1024, 7, stride=[50176, 1, 7168, 1024])
    assert channels_last.gpu_s < many.gpu_s / 20  # a thread for each number


def test_im2col_launches_a_kernel_for_each_sample():
    def unfolded(samples, length):
        given, made = tensor(samples, 384, length, 1), tensor(samples, 3456, length)
        return alone(call("aten.im2col.default", [given, [9, 1], [1, 1], [4, 0], [1, 1]], [made]), times=4)

    many, few = unfolded(512, 16), unfolded(16, 512)  # as many numbers
    assert many.gpu_s > 2 * few.gpu_s and many.host_s > 5 * few.host_s
    assert many.smact < few.smact


def test_compiled_programs_add_host_time_for_guards_and_kernels():
    wide = tensor(4, 768)
    written, own = (call(f"triton.{name}", [wide, wide, 3072], []) for name in ("triton_poi_fused_add_0", "my_kernel"))
    one, two, three = (alone(written, times=times).host_s for times in (1, 2, 3))
    assert three - two == pytest.approx(two - one)
    assert one > 1.1 * (two - one)  # beside what each kernel takes, something once
    assert alone(own, times=2).host_s - alone(own, times=1).host_s < 0.6 * (two - one)


def test_checkpointing_costs_more_host_time_than_its_forward():
    """Each tensor that is saved goes through hooks in Python: so much for each node, as far as modules are repeated."""
    row = tensor(64, 512)
    there = call("aten.gelu.default", [row], [row])
    back = call("aten.gelu_backward.default", [row, row], [row], **{"pass": "backward"})
    again, other = ({**one, "pass": "backward"} for one in (there, call("aten.silu.default", [row], [row])))

    def host(*calls, nodes):
        order = list(range(len(calls))) * 20
        return utilization_of(StepCalls(calls=list(calls), order=order, steady=True, nodes=nodes), H200).host_s

    def of_nodes(*calls):
        return host(*calls, nodes=2000) - host(*calls, nodes=1000)

    assert of_nodes(there, back, other) == pytest.approx(of_nodes(there, back))
    whole, half = of_nodes(there, back, again), of_nodes(there, there, back, again)
    assert whole - of_nodes(there, back) == pytest.approx(2 * (half - of_nodes(there, back)))
    assert whole > 1.3 * of_nodes(there, back)


def test_batch_norm_of_few_channels_takes_as_long_as_of_one():
    """PyTorch's kernel has a block for each channel, and most SMs have none."""

    def normalized(channels, trains=True):
        image, each = tensor(128, channels, 112, 112, dtype="bfloat16"), tensor(channels)
        given = [image, each, each, each, each, trains, 0.1, 1e-5]
        return alone(call("aten.native_batch_norm.default", given, [image, each, each]))

    few, many = normalized(4), normalized(16)
    assert few.gpu_s == pytest.approx(many.gpu_s, rel=0.3)
    assert few.smact < 0.05
    assert normalized(4, trains=False).gpu_s < few.gpu_s / 2


def test_calls_without_numbers_or_with_keywords_have_step_time():
    image, each = tensor(0, 0, 4, 4), tensor(0)
    empty = call(
        "aten.native_batch_norm.default", [image, each, each, each, each, True, 0.1, 1e-5], [image, each, each]
    )
    named = {**call("aten.upsample_bilinear2d.vec", [], [tensor(1, 3, 8, 8)]), "kwargs": {"input": tensor(1, 3, 4, 4)}}
    assert alone(empty, named).step_s > 0


def test_depthwise_convolutions_need_less_host_time():
    def convolved(groups, backward=False):
        source, weight = tensor(2, 64, 8, 8), tensor(64, 64 // groups, 3, 3)
        how = [[1, 1], [1, 1], [1, 1], False, [0, 0], groups]
        if not backward:
            return alone(call("aten.convolution.default", [source, weight, None, *how], [source])).host_s
        made = [source, weight, None]
        args = [source, source, weight, None, *how, [True, True, False]]
        return alone(call("aten.convolution_backward.default", args, made, **{"pass": "backward"})).host_s

    assert convolved(64) < convolved(1) < convolved(8)
    assert convolved(64, backward=True) < convolved(1, backward=True) < convolved(8, backward=True)


def test_cpu_operators_take_host_time_by_their_bytes():
    made = tensor(8, 8)
    add = call("aten.add.Tensor", [made, made], [made])
    none, some = (replace(step(add), cpu_bytes=nbytes) for nbytes in (0, 10**8))
    before, after = utilization_of(none, H200), utilization_of(some, H200)
    assert 0.01 < after.host_s - before.host_s < 0.1
    assert after.step_s - before.step_s == pytest.approx(after.host_s - before.host_s)
    twice = utilization_of(replace(none, cpu_bytes=2 * 10**8), H200)
    assert twice.host_s - before.host_s == pytest.approx(2 * (after.host_s - before.host_s))


def test_a_step_of_many_small_calls_waits_for_its_host():
    made = tensor(8, 8)
    found = alone(call("aten.add.Tensor", [made, made], [made]), times=500)
    assert found.waits_for_host and found.busy < 0.5 and found.smact < 0.5
    assert not alone(product(8192), times=500).waits_for_host


def test_copies_that_the_host_waits_for_make_a_step_longer():
    batch = tensor(256, 3, 224, 224)
    copy = call("aten._to_copy.default", [batch | {"cpu": True}], [batch])
    pinned = {**copy, "kwargs": {"non_blocking": True}}
    without, waiting, at_once = alone(product(8192)), alone(product(8192), copy), alone(product(8192), pinned)
    assert waiting.step_s > 2 * without.step_s
    assert at_once.step_s < 1.1 * without.step_s
    assert waiting.gpu_s == pytest.approx(without.gpu_s)


def test_other_gpus_follow_from_their_data_sheets():
    found = {name: alone(product(8192, dtype="float16"), card=gpu(name)) for name in ("H200", "A100-40GB", "T4")}
    assert found["H200"].gpu_s < found["A100-40GB"].gpu_s < found["T4"].gpu_s
    assert found["H200"].measured and not found["T4"].measured
    assert found["T4"].power_w <= gpu("T4").power_w


def test_shares_are_shares():
    for one in (product(64), product(8192, dtype="bfloat16"), call("aten.sum.default", [tensor(1 << 28)], [tensor()])):
        found = alone(one, times=50)
        assert all(0 <= share <= 1 for share in (found.smact, found.smocc, found.drama, found.tensor))
        assert 0 < found.power_w <= H200.power_w


def test_a_step_without_work_takes_no_time_on_the_gpu():
    found = utilization_of(StepCalls(), H200)
    assert found.gpu_s == 0 and found.smact == 0


def test_rates_are_read_back(tmp_path):
    (tmp_path / "rates.safetensors").write_bytes(packed(load()))
    again = load(tmp_path / "rates.safetensors")
    work = StepWork.of(step(product(8192)))
    assert utilization_of_work(work, H200, again) == utilization_of_work(work, H200, load())


@pytest.mark.parametrize("content", [b"", b"not rates", None])
def test_a_file_that_holds_no_rates_is_one_clear_error(tmp_path, content):
    path = tmp_path / "rates.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidValue, match="cannot read the rates in .*ullage lab train utilization"):
        load(path)


# The fit, on runs that were made up: every call takes twice its least time, and the host 40 microseconds a call.


@pytest.fixture(scope="module")
def followed():
    chance = random.Random(1)
    found = {}
    for number in range(40):
        rows, dtype = chance.choice([64, 512, 4096, 16384]), chance.choice(["float32", "bfloat16"])
        made = tensor(rows, 2048, dtype=dtype)
        calls = [product(rows, dtype=dtype), call("aten.add.Tensor", [made, made], [made])]
        order = [0] * chance.randint(5, 50) + [1] * chance.randint(5, 50)
        of_run = StepCalls(calls=calls, order=order, steady=True)
        configuration = {
            "model": "ullage_lab.networks.generated:mlp",
            "batch": rows,
            "opt": "sgd",
            "precision": "fp32",
            "input": [2048],
            "classes": 10,
            "settings": {"widths": [8]},
        }
        arch = chance.choice(["pyramid", "uniform", "gradual", "bottleneck"])
        found[f"run-{number}"] = (configuration, arch, of_run, _made_up(StepWork.of(of_run)))
    return found


def _made_up(work):
    least = np.array([one.least_time(H200) for one in work.works])
    gpu_s = float((work.counts * (2 * least + 1e-6)).sum())
    host_s = 4e-5 * sum(work.counts)
    step_s = work.copied / 7e9 + max(gpu_s, host_s)
    return {
        "step_seconds": step_s,
        "host_seconds": host_s,
        "gract": gpu_s / step_s,
        "smact": 0.6 * gpu_s / step_s,
        "smocc": 0.2 * gpu_s / step_s,
        "drama": 0.3 * gpu_s / step_s,
        "tensor": 0.1 * gpu_s / step_s,
        "power_w": 100 + 400 * 0.6 * gpu_s / step_s,
    }


def rows_of(followed):
    return [
        {"id": name, "family": "mlp", "arch": arch, "configuration": json.dumps(row), "machine": "one", **figures}
        for name, (row, arch, _, figures) in followed.items()
    ]


@pytest.fixture(scope="module")
def timed(followed):
    works = [work for _, _, calls, _ in followed.values() for work in StepWork.of(calls).works]
    return [runs.MeasuredCall(work, 2 * work.least_time(H200)) for work in works]


def test_the_fit_finds_what_the_runs_were_made_of(followed, timed):
    steps = {name: calls for name, (_, _, calls, _) in followed.items()}
    measured = runs.with_work(runs.read_alone(rows_of(followed)), steps)
    learn, test = ([run for run in measured if run.is_test is wanted] for wanted in (False, True))
    assert learn and test
    rates = fitting.fit(timed, learn, trees=30)
    for run in test:
        told = utilization_of_work(run.work, H200, rates)
        assert told.gpu_s == pytest.approx(run.gpu_s, rel=0.15)
        assert told.smact == pytest.approx(run.shares["smact"], abs=0.1)
    lines = {(line.figure, line.runs): line for line in judging.lines_of(rates, learn, test)}
    line = lines["time on the GPU, median error", "all"]
    assert line.count == len(test) and line.value < 0.1 < line.constant
    with pytest.raises(InvalidValue, match="some for fitting and some for testing"):
        judging.lines_of(rates, learn, [])


def test_another_machine_is_judged_by_the_speed_of_its_own_host(followed, timed):
    steps = {name: calls for name, (_, _, calls, _) in followed.items()}
    rows = rows_of(followed)
    rates = fitting.fit(
        timed, [run for run in runs.with_work(runs.read_alone(rows), steps) if not run.is_test], trees=30
    )
    slow = []
    for row in rows:
        gpu_s, host_s = row["gract"] * row["step_seconds"], 2 * row["host_seconds"]
        step_s = max(gpu_s, host_s)
        slow.append({**row, "machine": "slow", "step_seconds": step_s, "host_seconds": host_s, "gract": gpu_s / step_s})
    measured = runs.with_work(runs.read_alone(slow), steps)
    learn, test = ([run for run in measured if run.is_test is wanted] for wanted in (False, True))
    there = judging.on_host(rates, learn)
    assert sum(there.host.values()) == pytest.approx(2 * sum(rates.host.values()), rel=0.25)
    compiled = [replace(run, compiled=True, step_s=9 * run.step_s) for run in learn]
    assert judging.on_host(rates, learn + compiled).host == there.host  # their host does other things
    waiting = [run for run in test if run.gpu_s < 0.5 * run.step_s]
    assert waiting
    for run in waiting:
        assert utilization_of_work(run.work, H200, there).step_s == pytest.approx(run.step_s, rel=0.3)
        assert utilization_of_work(run.work, H200, rates).step_s < 0.75 * run.step_s
    with pytest.raises(InvalidValue, match="runs must be of families"):
        judging.on_host(rates, test)
    with pytest.raises(InvalidValue, match="at least 5 runs must wait for their host"):
        judging.on_host(rates, learn[:2])


def test_host_may_be_slower_for_long_steps_than_for_short_ones():
    """The runs whose speed is told by both lengths say so; where all are alike, nothing is made up."""
    lengths = [0.002 * 1.4**number for number in range(14)]
    factor, power = judging.host_speed([(one, 1.2 * (one / 0.02) ** 0.1) for one in lengths] + [(0.01, 9.0)])
    assert factor == pytest.approx(1.2, rel=0.05) and 0.07 < power <= 0.1
    factor, power = judging.host_speed([(0.02, 1.2), (0.021, 1.3), (0.02, 1.1), (0.019, 1.2), (0.02, 1.2)])
    assert factor == pytest.approx(1.2, rel=0.05) and abs(power) < 0.01
    made = tensor(8, 8)
    short, long = (step(call("aten.add.Tensor", [made, made], [made]), times=times) for times in (50, 5000))
    even, uneven = load().with_host(1.0), load().with_host(1.0, 0.1)
    ratio = [utilization_of(one, H200, uneven).host_s / utilization_of(one, H200, even).host_s for one in (short, long)]
    assert ratio[0] < 1 < ratio[1]


def test_the_machine_that_the_rates_know_is_judged_first(followed, timed):
    rows = rows_of(followed)
    rates = replace(load(), card={"machine": "one"})
    others = [{**row, "id": f"{row['id']}-{number}", "machine": "two"} for row in rows for number in range(2)]
    assert {run.machine for run in judging.of_one_host(runs.read_alone([*rows, *others]), rates)} == {"one"}
    assert {run.machine for run in judging.of_one_host(runs.read_alone(others), rates)} == {"two"}


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.jsonl.gz"])
def test_a_file_of_something_else_is_refused_and_unchanged(followed, tmp_path, name):
    mine = tmp_path / name
    text = b'{"id": "run-0", "figure": 12}\n'
    mine.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    before = mine.read_bytes()
    configurations = [{**row, "id": name} for name, (row, *_) in followed.items()]
    with pytest.raises(InvalidValue, match="is not a file of followed steps, and was left as it is"):
        runs.follow(configurations, mine)
    assert mine.read_bytes() == before


def test_too_few_runs_are_reported(timed):
    with pytest.raises(InvalidValue, match="fitting needs at least 10 runs"):
        fitting.fit(timed, [])


@pytest.mark.slow
def test_train_and_evaluate_from_the_command_line(followed, timed, tmp_path):
    table = tmp_path / "runs.parquet"
    frame([{**row, "layers": []} for row in rows_of(followed)]).write_parquet(table)
    kept = tmp_path / "steps.jsonl"
    kept.write_text(
        "".join(
            json.dumps({"id": name, "step": runs._packed(calls)}) + "\n" for name, (_, _, calls, _) in followed.items()
        )
    )
    rates = tmp_path / "rates.jsonl"
    calls = {json.dumps(one): one for _, _, step_calls, _ in followed.values() for one in step_calls.calls}
    lines = []
    for number, one in enumerate(calls.values()):
        work = StepWork.of(replace(StepCalls(), calls=[one], order=[0])).works
        if work:
            seconds = 2 * work[0].least_time(H200)
            lines.append({"id": str(number), "how": "graph", "gpu_us": 1e6 * seconds, "call": runs.packed(one)})
    rates.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = tmp_path / "made.safetensors"
    words = ["--data", str(table), "--rates", str(rates), "--resume", str(kept), "--out", str(made), "--trees", "10"]
    shown = ullage("lab", "train", "utilization", *words)
    assert shown.returncode == 0 and "step time, median error" in shown.stdout, shown.stderr
    again = ullage(
        "lab", "evaluate", "utilization", "--data", str(table), "--weights", str(made), "--resume", str(kept), "--json"
    )
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert found["together"] == [] and found["alone"][0]["count"] > 0
    elsewhere = tmp_path / "elsewhere.parquet"
    rows = [{**row, "machine": "two", "layers": []} for row in rows_of(followed)]
    frame(rows).write_parquet(elsewhere)
    there = ullage(
        "lab",
        "evaluate",
        "utilization",
        "--data",
        str(elsewhere),
        "--weights",
        str(made),
        "--resume",
        str(kept),
        "--json",
    )
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout)["alone"][0]["count"] == found["alone"][0]["count"]
