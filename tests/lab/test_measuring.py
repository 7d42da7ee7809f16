"""Measured files: resumed after a kill, mended, with a header; the children's work, on a virtual GPU."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import ullage as command

import ullage
from ullage.errors import InvalidValue
from ullage.jobs import Model, read_rows, train
from ullage.jobs.sources.build import prepare
from ullage.units import GIB
from ullage_lab.draw.generated import DEFAULTS, generate
from ullage_lab.measure import dataset as measuring
from ullage_lab.measure import utilization as utilization_run
from ullage_lab.measure.dataset import MeasurementSettings, measure_rows, mend, need
from ullage_lab.measure.memory import cheap_start, fill, on_gpu, prepare_memory, run_memory
from ullage_lab.measure.pool import ParallelRuns, RunKind
from ullage_lab.measure.utilization import prepare_utilization, run_utilization

SMALL = DEFAULTS["mlp"] | {"inputs": (4, 64), "batch": (4, 16), "balanced": (0.0,)}

# A session that measures with children that count their runs instead of training; the first run of "slow" waits.
SESSION = """
import os, signal, sys
from collections.abc import Callable
from pathlib import Path
from ullage_lab.measure import dataset as measuring
from ullage_lab.measure.pool import ParallelRuns, RunKind
from ullage_lab.draw.generated import generate

folder, count = Path(sys.argv[1]), int(sys.argv[2])

def run(order, pause):
    with (folder / "runs").open("a") as file:
        file.write(order["id"] + "\\n")
    if order["id"].endswith("4") and not (folder / "go").exists():
        signal.pause()
    return {"peak_reserved": 5, "by": os.getpid()}

def prepare_runs(plan):
    kind = RunKind(prepare=lambda order: order, run=run, gpu_memory=lambda order: 1)
    return ParallelRuns(kind, total=9, at_once=1, timeout=60), {"gpu": "none"}

measuring.prepare_runs = prepare_runs
settings = measuring.MeasurementSettings(out=folder / "out.jsonl")
left, rows = measuring.measure_rows(list(generate("mlp", count, 0)), settings)
print("left", left, flush=True)
for row in rows:
    pass
"""


def counting_server(answers: Any, header: dict[str, Any]) -> Any:
    def make(plan: MeasurementSettings) -> tuple[ParallelRuns, dict[str, Any]]:
        kind = RunKind(prepare=lambda order: order, run=lambda order, pause: answers(order), gpu_memory=lambda order: 1)
        return ParallelRuns(kind, total=9, at_once=2, timeout=30), header

    return make


def test_a_killed_session_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """kill -9 while a run is on the way and a line is torn: afterwards every run is there once, none measured twice."""
    command = [sys.executable, "-c", SESSION, str(tmp_path), "8"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "runs").exists() or "00004" not in (tmp_path / "runs").read_text():
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    out = tmp_path / "out.jsonl"
    with out.open("a") as file:
        file.write('{"id": "mlp-0-00004", "pass": "mem')
    (tmp_path / "go").touch()
    second = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert second.stdout == "left 4\n", second.stderr
    rows = [row for row in read_rows(out) if "id" in row]
    assert sorted(row["id"] for row in rows) == [f"mlp-0-{number:05d}" for number in range(8)]
    runs = (tmp_path / "runs").read_text().split()
    assert sorted(runs) == sorted([row["id"] for row in rows] + ["mlp-0-00004"])  # that one began twice
    assert sum("header" in row for row in read_rows(out)) == 1


def test_a_changed_machine_gets_a_header_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, plan = list(generate("mlp", 4, 0)), MeasurementSettings(out=tmp_path / "out.jsonl")
    for count, header in ((2, {"gpu": "one"}), (3, {"gpu": "one"}), (4, {"gpu": "two"})):
        monkeypatch.setattr(measuring, "prepare_runs", counting_server(lambda order: {}, header))
        list(measure_rows(rows[:count], plan)[1])
    kinds = ["header" if "header" in row else "run" for row in read_rows(plan.out)]
    assert kinds == ["header", "run", "run", "run", "header", "run"]


def test_memory_and_utilisation_of_a_run_are_separate_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "prepare_runs", counting_server(lambda order: {}, {}))
    rows, out = list(generate("mlp", 2, 0)), tmp_path / "out.jsonl"
    list(measure_rows(rows, MeasurementSettings(out=out))[1])
    assert measure_rows(rows, MeasurementSettings(out=out))[0] == 0
    assert measure_rows(rows, MeasurementSettings(out=out, utilization=True))[0] == 2
    assert mend(out, "memory") == {"mlp-0-00000", "mlp-0-00001"}


def test_raw_logs_lie_in_a_folder_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = MeasurementSettings(out=tmp_path / "out.jsonl", raw=tmp_path / "raw")

    def make(plan: MeasurementSettings) -> tuple[ParallelRuns, dict[str, Any]]:
        def run(order: dict[str, Any], pause: Any) -> dict[str, Any]:
            print("step 1")
            return {"peak_reserved": 3}

        kind = RunKind(prepare=lambda order: order, run=run, gpu_memory=lambda order: 1, log=plan.log)
        return ParallelRuns(kind, total=9, at_once=1, timeout=30), {}

    monkeypatch.setattr(measuring, "prepare_runs", make)
    list(measure_rows(list(generate("mlp", 1, 0)), plan)[1])
    assert (tmp_path / "raw/mlp-0-00000/memory.log").read_text() == "step 1\n"
    assert json.loads((tmp_path / "raw/mlp-0-00000/memory.json").read_text())["peak_reserved"] == 3


def test_rows_are_checked_before_anything_runs(tmp_path: Path) -> None:
    row = next(generate("mlp", 1, 0))
    with pytest.raises(InvalidValue, match="a unique id"):
        measure_rows([row, row], MeasurementSettings(out=tmp_path / "x"))
    with pytest.raises(InvalidValue, match="batch_size"):
        measure_rows([row | {"batch": 0}], MeasurementSettings(out=tmp_path / "x"))


def test_without_a_gpu_the_command_says_what_it_needs(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(next(generate("mlp", 1, 0))) + "\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = command("lab", "measure", "dataset", file, "--out", tmp_path / "out.jsonl")
    assert done.returncode == 1
    assert "cannot measure: PyTorch finds no NVIDIA GPU" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_readings_belong_to_utilisation(tmp_path: Path) -> None:
    done = command(
        "lab", "measure", "dataset", tmp_path / "rows.jsonl", "--out", tmp_path / "out.jsonl", "--readings", 3
    )
    assert done.returncode == 2 and "add --utilization" in done.stderr


@pytest.mark.parametrize("number", range(4))
def test_memory_as_child_measures_it_is_that_of_the_usual_loop(number: int) -> None:
    """On the virtual GPU the prepared run asks for exactly what `train` asks for by itself."""
    row = list(generate("mlp", 4, 2, SMALL))[number]
    with ullage.virtual_gpu("H200") as gpu:
        found = run_memory(prepare_memory({**row, "iterations": 3}))
    with ullage.virtual_gpu("H200") as usual:
        train(Model.from_row(row), 4 if row["precision"] == "amp_fp16" else 3)
    assert found["peak_alloc"] == usual.peak_allocated == gpu.peak_allocated
    assert found["peak_reserved"] == usual.peak_reserved
    assert found["optimizer_steps"] >= 3
    assert found["nvml_end"] is None  # unknown, as there is no driver


def test_steps_that_a_scaler_skips_are_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(generate("mlp", 1, 2, SMALL)) | {"precision": "amp_fp16", "opt": "adam"}
    skipped: list[None] = []
    step = torch.amp.GradScaler._maybe_opt_step  # called when the gradients are unscaled and known to be finite or not

    def skipping(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> float | None:
        skipped.append(None)
        return step(self, *args, **kwargs) if len(skipped) > 5 else None

    with ullage.virtual_gpu("H200"):
        usual = run_memory(prepare_memory(row))
    monkeypatch.setattr(torch.amp.GradScaler, "_maybe_opt_step", skipping)
    with ullage.virtual_gpu("H200"):
        found = run_memory(prepare_memory(row))
    assert found["optimizer_steps"] == 2 and len(skipped) == 7
    assert found["peak_reserved"] == usual["peak_reserved"]


def test_running_out_of_memory_is_an_answer_with_the_size_tried() -> None:
    row = next(generate("mlp", 1, 2, SMALL)) | {"batch": 10_000_000}
    with ullage.virtual_gpu("T4"):
        found = run_memory(prepare_memory({**row, "batch": 400_000_000 // row["input"][0] * 20}))
    assert "out of memory" in found["oom"]
    assert found["tried"] > 14 * GIB


def test_utilisation_is_read_after_warming_up() -> None:
    row = next(generate("mlp", 1, 2, SMALL))
    with ullage.virtual_gpu("H200"):
        found = run_utilization(prepare_utilization({**row, "seconds": 0.2}))
    assert found["steps"] > 0 and found["warm_steps"] >= 3 and found["read_s"] >= 0.2
    assert found["smact"] is None and found["unknown_because"]
    assert found["ram_bytes"] > 0 and found["cpu_percent"] > 0
    assert found["host_busy"] > 0.1 and 0 <= found["host_stolen"] <= 1
    assert 0 < found["step_q1"] <= found["step_median"] <= found["step_q3"]


def test_of_several_readings_in_turns_the_middle_one_counts() -> None:
    row = next(generate("mlp", 1, 2, SMALL))
    turns: list[int] = []
    with ullage.virtual_gpu("H200"):
        prepared = prepare_utilization({**row, "seconds": 0.05, "readings": 3})
        found = run_utilization(prepared, lambda: turns.append(1))
    assert len(turns) == 3
    for name in ("step_s", "host_s"):
        assert found[name] == sorted(found["readings"][name])[1] and len(found["readings"][name]) == 3
    assert 0 < found["host_forward_s"] < found["host_s"]


def test_a_second_run_in_a_process_finds_an_empty_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger run before it leaves no trace in its figures; what is known of the process alone is left out."""
    monkeypatch.setattr(utilization_run, "_is_renewed", False)
    small, large = ({**row, "seconds": 0.1} for row in generate("mlp", 2, 2, SMALL))
    large["batch"] *= 16
    with ullage.virtual_gpu("H200"):
        fresh = run_utilization(prepare_utilization(small))
    with ullage.virtual_gpu("H200"):
        run_utilization(prepare_utilization(large))
        utilization_run.renew()
        again = run_utilization(prepare_utilization(small))
    assert again["peak_reserved"] == fresh["peak_reserved"] and again["peak_alloc"] == fresh["peak_alloc"]
    assert fresh.keys() - again.keys() == {"nvml_ctx", "nvml_end", "ram_bytes"}


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_the_hosts_time_leaves_out_what_it_waits_for_the_gpu(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that needs an hour for a step: the host has launched the step long before."""
    row = next(generate("mlp", 1, 2, SMALL)) | {"precision": precision, "opt": "adam", "seconds": 0.2}
    clock, hours = time.perf_counter, [0]

    def slow() -> None:
        hours.append(len(hours))

    with ullage.virtual_gpu("H200"):
        prepared = prepare_utilization(row)
        monkeypatch.setattr(torch.cuda, "synchronize", slow)
        monkeypatch.setattr(utilization_run.time, "perf_counter", lambda: clock() + 3600 * hours[-1])
        found = run_utilization(prepared)
    assert 0 < found["host_s"] < 3600 and len(hours) > 3


def test_the_hosts_time_is_reported_by_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass of two hours, a backward pass of three, an optimizer of five."""
    row = next(generate("mlp", 1, 2, SMALL)) | {"precision": "fp32", "opt": "sgd", "seconds": 0.2}
    clock, hours = time.perf_counter, [0]

    def longer(by: int, act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*args: Any, **options: Any) -> Any:
            hours[0] += by
            return act(*args, **options)

        return acting

    monkeypatch.setattr(torch.Tensor, "backward", longer(3, torch.Tensor.backward))
    monkeypatch.setattr(torch.optim.SGD, "step", longer(5, torch.optim.SGD.step))
    with ullage.virtual_gpu("H200"):
        prepared = prepare_utilization(row)
        model, task = prepared.made
        model.forward = longer(2, model.forward)
        monkeypatch.setattr(utilization_run.time, "perf_counter", lambda: clock() + 3600 * hours[0])
        found = run_utilization(prepared)
    told = [round(found[name] / 3600) for name in ("host_s", "host_forward_s", "host_backward_s")]
    assert told == [10, 2, 3]


def test_cheap_weights_are_small_finite_and_leave_norms_alone() -> None:
    with cheap_start():
        layers = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.LayerNorm(500), torch.nn.Embedding(70_000, 3))
    weight = layers[0].weight
    assert 0 < weight.abs().max() <= 500**-0.5 and weight.std() > 0.01
    assert layers[1].weight.min() == 1  # type: ignore[operator]
    assert all(bool(part.isfinite().all()) for part in layers.parameters())
    fresh = torch.nn.Linear(4, 4)
    assert fresh.weight.unique().numel() == 16
    large = fill(torch.empty(5000, 5000))
    assert bool(large.isfinite().all()) and large.abs().max() <= 1


def test_large_weights_are_made_on_the_gpu_as_moving_them_would() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Embedding(3000, 300), torch.nn.Linear(300, 3000)
            self.last.weight = self.first.weight
            self.norm = torch.nn.BatchNorm1d(300)

    def places(low: torch.dtype | None, cheap: bool) -> list[int]:
        with cheap_start():
            model = Tied()
        with ullage.virtual_gpu("H200"):
            if cheap:
                on_gpu(model, low)
            else:
                model.to(low or torch.float32).to("cuda")
            assert model.first.weight is model.last.weight and model.first.weight.is_cuda
            tensors = (*model.parameters(), *model.buffers())
            return [tensor.data_ptr() for tensor in tensors] + [torch.cuda.max_memory_allocated()]

    with cheap_start():
        drawn = on_gpu(Tied(), torch.bfloat16, drawn=True, device="cpu")
    assert all(bool(weight.isfinite().all()) and weight.dtype == torch.bfloat16 for weight in drawn.parameters())
    assert 0 < drawn.first.weight.abs().max() <= 3000**-0.5 + 1e-4
    assert places(None, cheap=True) == places(None, cheap=False)
    assert places(torch.bfloat16, cheap=True) == places(torch.bfloat16, cheap=False)


def test_half_precision_gradients_do_not_block_optimizer_steps() -> None:
    rows = [row for row in generate("mlp", 30, 8, SMALL) if row["precision"] == "amp_fp16"][:3]
    for row in rows:
        with cheap_start():
            model, task = prepare(Model.from_row(row))
        model = on_gpu(model, device="cpu")
        inputs, targets = task.batch(row["batch"])
        task.loss(model(inputs), targets).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        assert all(grad is not None and bool(grad.isfinite().all()) for grad in grads)


def test_convolutions_in_16_bits_get_more_room() -> None:
    assert need({"need": GIB, "family": "cnn", "precision": "bf16"}) > need(
        {"need": GIB, "family": "cnn", "precision": "fp32"}
    )
    assert need({}) == measuring.UNKNOWN_NEED
