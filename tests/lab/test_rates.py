"""`ullage measure rates`: calls from followed steps, real tensors for them, a stand-in for the GPU, profiles."""

import json
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from tests.commands import ullage as run
from torch import nn

from ullage.errors import InvalidValue
from ullage.jobs import JobRequest
from ullage.performance.step import StepCalls
from ullage.virtual import virtual_gpu
from ullage_lab.calls import identity, packed, prepared, unpacked
from ullage_lab.draw import calls as listing
from ullage_lab.following import step_of
from ullage_lab.measure import profiles, rounds, timing
from ullage_lab.train.steps.runs import calls_in_steps, read_calls


def tensor(*shape: int, dtype: str = "float32", **more: object) -> dict:
    return {"shape": list(shape), "dtype": dtype, **more}


def call(operator: str, *args: object, outputs: tuple = (), **more: object) -> dict:
    given = {"operator": f"aten.{operator}", "pass": "forward", "args": list(args), "kwargs": {}}
    return {**given, "outputs": list(outputs), **more}


@pytest.fixture(scope="module")
def step() -> dict:
    def train() -> None:
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, 5),
            nn.Dropout(0.5),
        ).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            out = model(torch.zeros(2, 3, 8, 8).cuda())
            nn.functional.cross_entropy(out, torch.zeros(2, dtype=torch.int64, device="cuda")).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step_of(JobRequest(train)).to_dict()


def test_tensors_are_such_as_the_call_had() -> None:
    given = call("add.Tensor", tensor(2, 3, stride=[1, 2], dtype="float16"), tensor(3, dtype="bfloat16"))
    operator, (first, second), _ = prepared({**given, "kwargs": {"alpha": 2}}, "cpu")
    assert operator is torch.ops.aten.add.Tensor
    assert (first.shape, first.stride(), first.dtype) == ((2, 3), (1, 2), torch.float16)
    assert second.dtype is torch.bfloat16
    assert first.std() > 0  # power depends on numbers


def test_one_tensor_given_twice_stays_one() -> None:
    _, args, _ = prepared(call("mul.Tensor", tensor(4), tensor(4), same=[0, 1]), "cpu")
    assert args[0] is args[1]


INT = {"dtype": "int64"}


@pytest.mark.parametrize(
    "given",
    [
        call("embedding.default", tensor(7, 2), tensor(50, **INT)),
        call("embedding_dense_backward.default", tensor(50, 2), tensor(50, **INT), 7, -1, False),
        call("nll_loss_forward.default", tensor(9, 3), tensor(9, **INT), None, 1, -100),
        call("gather.default", tensor(2, 3), 1, tensor(2, 50, **INT)),
        call("index_select.default", tensor(2, 3), 1, tensor(50, **INT)),
        call("index.Tensor", tensor(2, 30), [None, tensor(50, **INT)]),
        call("index_put_.default", tensor(2, 30), [tensor(50, **INT), tensor(50, **INT)], tensor(50)),
        call("scatter_add.default", tensor(2, 3), 1, tensor(2, 3, **INT), tensor(2, 3)),
        call(
            "max_pool2d_with_indices_backward.default",
            tensor(1, 1, 3, 3),
            tensor(1, 1, 6, 6),
            [2, 2],
            [2, 2],
            [0, 0],
            [1, 1],
            False,
            tensor(1, 1, 3, 3, **INT),
        ),
    ],
    ids=lambda given: given["operator"],
)
def test_indices_lie_inside_of_what_they_point_into(given: dict) -> None:
    operator, args, kwargs = prepared(given, "cpu")
    operator(*args, **kwargs)


def test_a_packed_call_is_the_same_when_unpacked(step: dict) -> None:
    assert [unpacked(json.loads(json.dumps(packed(one)))) for one in step["calls"]] == step["calls"]
    names = [identity(one) for one in step["calls"]]
    assert identity({**step["calls"][0], "pass": "elsewhere"}) == names[0]
    assert len(set(names)) > len(names) / 2


def test_every_call_of_a_step_is_timed_on_a_stand_in(step: dict) -> None:
    with virtual_gpu("H200"):
        rows = list(timing.measured(step["calls"]))
    assert [row for row in rows if "failed" in row] == []
    ways = {row["operator"]: row["how"] for row in rows}
    assert ways["aten.convolution_backward.default"] == ways["aten._foreach_sqrt.default"] == "graph"
    assert ways["aten.t.default"] == "view" and ways["aten._to_copy.default"] == "loop"
    assert all(row["host_us"] > 0 for row in rows)


def test_counters_are_read_for_every_so_many_calls_or_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [call("exp.default", tensor(size), outputs=(tensor(size),)) for size in range(1, 6)]
    measure = timing.CallTimer.measure

    def noted(self: timing.CallTimer, given: dict, with_activity: bool = False) -> dict:
        return {**measure(self, given), "asked": with_activity}

    monkeypatch.setattr(timing.CallTimer, "measure", noted)
    with virtual_gpu("H200"):
        asked = {every: [row["asked"] for row in timing.measured(calls, every)] for every in (2, 0)}
    assert asked == {2: [True, False, True, False, True], 0: [False] * 5}


def test_after_a_failed_call_the_next_one_is_measured(tmp_path: Path) -> None:
    calls = [call("no_such.default"), call("exp.default", tensor(4), outputs=(tensor(4),))]
    with virtual_gpu("H200"):
        first, second = timing.measured(calls, started=tmp_path / "started")
    assert "no_such" in first["failed"] and "failed" not in second
    assert timing.died_in(tmp_path / "started") is None


def test_the_call_in_which_a_process_ended_is_known(tmp_path: Path) -> None:
    given = call("exp.default", tensor(4), outputs=(tensor(4),))
    with virtual_gpu("H200"):
        rows = timing.measured([given, given], started=tmp_path / "started")
        next(rows)
    died = timing.died_in(tmp_path / "started")
    assert died is not None and died["id"] == identity(given)


def test_chosen_calls_are_whole_steps_with_every_operator(step: dict) -> None:
    others = [
        call(f"{name}.default", tensor(size), outputs=(tensor(size),))
        for name in ("exp", "log", "tanh")
        for size in range(1, 40)
    ]
    found = listing.chosen([step, {"calls": others}], 60, whole=1, seed=1)
    assert found == listing.chosen([step, {"calls": others}], 60, whole=1, seed=1)
    names = {identity(one) for one in found}
    assert {identity(one) for one in step["calls"] if not one.get("view")} <= names
    assert {"aten.exp.default", "aten.log.default", "aten.tanh.default"} <= {one["operator"] for one in found}


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: object) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_a_profile_is_condensed_to_operators_and_their_kernels() -> None:
    gemm = {"correlation": 1, "grid": [2, 1, 1], "block": [128, 1, 1], "registers per thread": 90}
    events = [
        event("user_annotation", "ullage step", 0, 10),
        event("user_annotation", "ullage step", 100, 50),
        event("cpu_op", "aten::linear", 101, 10, **{"External id": 1}),
        event("cpu_op", "aten::addmm", 102, 8, **{"External id": 2, "Input Dims": [[4], [2, 8], [8, 4]]}),
        event("cuda_runtime", "cudaLaunchKernel", 105, 2, correlation=1),
        event("kernel", "gemm", 112, 3, tid=7, **gemm, **{"External id": 2}),
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 120, 10, tid=2),
        event("cpu_op", "aten::mm", 121, 5, tid=2),
        event("cuda_runtime", "cudaLaunchKernel", 123, 1, tid=2, correlation=2),
        event("kernel", "gemm", 130, 4, tid=7, **{**gemm, "correlation": 2}),
        event("cpu_op", "aten::exp", 200, 5),
    ]
    found = profiles.condensed(events)
    assert [found["names"][number] for number in found["calls"]["name"]] == ["aten::addmm", "aten::mm"]
    assert found["calls"]["thread"] == [0, 1]
    assert found["calls"]["begin"] == [2000, 19000] and found["calls"]["taken"] == [8000, 5000]
    assert found["kernels"]["call"] == [0, 1] and found["kernels"]["taken"] == [3000, 4000]
    assert found["launches"] == [[[2, 1, 1], [128, 1, 1], 90, None, None]]
    assert found["profiled_s"] == 50e-6 and found["launched"] == 2


def test_casts_of_autocast_are_separate_from_their_operator() -> None:
    events = [
        event("user_annotation", "ullage step", 0, 50),
        event("cpu_op", "aten::softplus", 1, 20),
        event("cpu_op", "aten::to", 2, 5),
        event("cpu_op", "aten::_to_copy", 3, 3),
        event("cpu_op", "aten::softplus", 10, 5),
    ]
    found = profiles.condensed(events)
    assert [found["names"][number] for number in found["calls"]["name"]] == ["aten::_to_copy", "aten::softplus"]


def test_without_a_gpu_one_line_reports_it_before_any_run(tmp_path: Path) -> None:
    ran = run("lab", "measure", "calls", "--out", tmp_path / "rates.jsonl")
    assert ran.returncode != 0 and "PyTorch finds no GPU" in ran.stderr and "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_calls_of_a_script_can_be_printed_and_read_again(tmp_path: Path, warm: None) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "layer = torch.nn.Linear(8, 4).cuda()\n"
        "optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)\n"
        "for _ in range(5):\n"
        "    layer(torch.zeros(2, 8, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    ran = run("lab", "measure", "calls", script, "--dry-run")
    assert ran.returncode == 0, ran.stderr
    (tmp_path / "calls.jsonl").write_text(ran.stdout)
    names = {one["operator"] for one in listing.listed_calls(tmp_path / "calls.jsonl")}
    assert {"aten.addmm.default", "aten.mm.default", "aten._foreach_add_.List"} <= names


def test_drawn_runs_are_of_every_kind_and_the_same_again() -> None:
    rows = listing.drawn_runs(30, seed=3)
    assert rows == listing.drawn_runs(30, seed=3)
    assert len({row["id"] for row in rows}) == 30
    kinds = {row["model"].partition(":")[0] for row in rows}
    assert {"tv", "timm", "hf", "ullage_lab.networks.generated", "ullage_lab.networks.rarer"} <= kinds


def test_the_note_of_the_current_call_is_ours_or_left_alone(tmp_path: Path) -> None:
    started = tmp_path / "rates.jsonl.started"
    assert timing.died_in(started) is None
    started.write_text("")  # its writer was killed
    assert timing.died_in(started) is None
    started.write_text('{"id": "a", "operator": "aten.mm.default"}')
    assert timing.died_in(started) == {
        "id": "a",
        "operator": "aten.mm.default",
        "failed": "the process ended in this call",
    }
    for text in ("a diary", "[1]", "{}"):
        started.write_text(text)
        with pytest.raises(InvalidValue, match="something else"):
            timing.died_in(started)
        assert started.read_text() == text


def answering_on_a_stand_in(pipe: Connection) -> None:
    with virtual_gpu("H200"):
        rounds.answering(pipe)


@pytest.mark.slow
def test_processes_make_calls_ready_and_each_is_timed_once() -> None:
    calls = [call("exp.default", tensor(size), outputs=(tensor(size),)) for size in range(1, 30)]
    calls[7] = call("no_such.default", tensor(3), outputs=(tensor(3),))
    rows = list(rounds.measured(calls, 2, answer=answering_on_a_stand_in))
    assert {row["id"] for row in rows} == {identity(one) for one in calls} and len(rows) == len(calls)
    assert [row["operator"] for row in rows if "failed" in row] == ["aten.no_such.default"]
    assert all(row["how"] == "graph" and row["gpu_us"] > 0 for row in rows if "failed" not in row)


def in_a_hurry(pipe: Connection) -> None:
    rounds._PREPARING = 0.0
    answering_on_a_stand_in(pipe)


@pytest.mark.slow
def test_calls_without_time_wait_for_the_next_round() -> None:
    calls = [call("exp.default", tensor(size), outputs=(tensor(size),)) for size in range(1, 8)]
    rows = list(rounds.measured(calls, 2, answer=in_a_hurry))
    assert sorted(row["id"] for row in rows) == sorted(identity(one) for one in calls)
    assert all(row["gpu_us"] > 0 for row in rows)


def ending(pipe: Connection) -> None:
    pipe.recv()


@pytest.mark.slow
def test_the_calls_of_a_process_that_ended_have_failed() -> None:
    rows = list(rounds.measured([call("exp.default", tensor(4), outputs=(tensor(4),))], 1, answer=ending))
    assert [row["failed"] for row in rows] == ["the process ended in one of these calls"]


def test_shorter_gaps_are_added_and_empty_calls_left_out(
    tmp_path: Path,
) -> None:
    given = call("exp.default", tensor(4), outputs=(tensor(4),))
    rows = [
        {"id": name, "how": "graph", "gpu_us": taken, "call": packed(given)} for name, taken in (("a", 2.0), ("b", 0.1))
    ]
    for name, header in (("one", {"machine": {}}), ("other", {"machine": {}, "shorter_us": 0.25})):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in (header, *rows)))
    times = [[found.seconds for found in read_calls([tmp_path / name])] for name in ("one", "other")]
    assert times == [[pytest.approx(2e-6)], [pytest.approx(2.25e-6)]]


def test_early_counters_keep_only_smocc_over_smact(tmp_path: Path) -> None:
    given = call("exp.default", tensor(4), outputs=(tensor(4),))
    row = {"how": "graph", "gpu_us": 2.0, "call": packed(given)}
    read = {"a": {"smact": 0.8, "smocc": 0.4}, "b": {"smact": 0.4, "smocc": 0.2}, "c": {"smact": 0.1, "smocc": 0.01}}
    rows = [{"id": name, **row, "activity": shares} for name, shares in read.items()] + [{"id": "d", **row}]
    (tmp_path / "rates").write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert [found.warps for found in read_calls([tmp_path / "rates"])] == [0.5, 0.5, None, None]


def test_a_profile_reports_the_warps_that_a_calls_kernels_keep(tmp_path: Path) -> None:
    """By registers where blocks are many, by the grid where they are few; weighted by time, without copies."""
    many, few, copy = [[4096, 1, 1], [256, 1, 1], 128, 0, None], [[64, 1, 1], [256, 1, 1], 32, 0, None], [None] * 5
    kernels = {"call": [0, 0, 0], "name": [1, 1, 1], "launch": [0, 1, 2], "taken": [3000, 1000, 1000]}
    row = {
        "id": "a",
        "model": "tv:vgg11",
        "names": ["aten::exp", "kernel"],
        "kernels": kernels,
        "launches": [many, few, copy],
        "calls": {"name": [0]},
    }
    (tmp_path / "profiles.jsonl").write_text(json.dumps(row) + "\n")
    made = StepCalls(calls=[call("exp.default", tensor(4), outputs=(tensor(4),))], order=[0])
    [found] = calls_in_steps(tmp_path / "profiles.jsonl", {"a": made})
    assert found.seconds == pytest.approx(5e-6)
    assert found.warps == pytest.approx((3 * 0.25 + 0.125) / 4)


def test_profiles_of_families_for_testing_are_not_learned_from(tmp_path: Path) -> None:
    kernels = {"call": [0], "name": [1], "launch": [0], "taken": [3000]}
    row = {
        "id": "a",
        "model": "tv:efficientnet_b0",
        "names": ["aten::exp", "kernel"],
        "kernels": kernels,
        "launches": [[[1, 1, 1], [32, 1, 1], 32, 0, None]],
        "calls": {"name": [0]},
    }
    made = StepCalls(calls=[call("exp.default", tensor(4), outputs=(tensor(4),))], order=[0])
    for model, count in (("tv:efficientnet_b0", 0), ("tv:vgg11", 1)):
        (tmp_path / "profiles.jsonl").write_text(json.dumps(row | {"model": model}) + "\n")
        assert len(calls_in_steps(tmp_path / "profiles.jsonl", {"a": made})) == count
