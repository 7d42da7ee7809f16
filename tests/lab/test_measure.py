"""Measuring: one run (on the virtual GPU, where the real one would be), the promises of memory, the random runs."""

import json
import sys
import threading
from dataclasses import replace

import pytest
import torch
from tests import commands

import ullage
from ullage.errors import InvalidValue
from ullage.jobs import Model
from ullage.measuring import runs, single_run
from ullage.measuring.runs import GpuMemory, RunRequest, read_runs
from ullage.measuring.single_run import measure_here
from ullage_lab.draw.configurations import draw

ROW = {"id": "a", "model": "mlp:x", "widths": [784, 256, 10], "batch": 512, "opt": "adam"}


def measured(**request):
    with ullage.virtual_gpu("H200") as gpu:
        return measure_here({"row": ROW, "iterations": 3, **request}), gpu


def test_a_run_gives_the_figures_of_the_measured_files():
    answer, gpu = measured()
    assert (answer["peak_alloc"], answer["peak_reserved"]) == (gpu.peak_allocated, gpu.peak_reserved)
    assert len(answer["per_iter"]) == 3 and answer["per_iter"][-1] == [answer["peak_alloc"], answer["peak_reserved"]]
    assert answer["end_alloc"] > 0 and answer["retries"] == 0 and answer["step_s"] > 0
    assert answer["nvml_ctx"] is None, "unknown is None where there is no NVML, never 0"


def test_a_cap_at_the_peak_survives_and_one_below_does_not():
    peak = measured()[0]["peak_reserved"]
    assert "oom" not in measured(cap=peak)[0]
    below = measured(cap=peak - (4 << 20))[0]
    assert below["oom"].startswith("CUDA out of memory") and below["peak_reserved"] < peak


def test_a_script_is_run_as_python_would(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, torch\nassert __name__ == '__main__'\n"
        "x = torch.zeros(int(sys.argv[1]), device='cuda')\nraise SystemExit(0)\n"
    )
    with ullage.virtual_gpu("H200"):
        before = sys.argv
        try:
            answer = measure_here({"script": str(script), "args": [str(1 << 20)]})
        finally:
            sys.argv = before
    assert answer["peak_alloc"] == 4 << 20


@pytest.mark.slow
def test_a_row_may_be_a_script_with_its_folder_and_variables(tmp_path):
    (tmp_path / "size").write_text("1048576")
    (tmp_path / "job.py").write_text(
        "import os, sys, torch\nsize = int(open('size').read()) * int(os.environ['TIMES']) * int(sys.argv[1])\n"
        "x = torch.zeros(size, device='cuda', requires_grad=True)\nx.sum().backward()\n"
    )
    row = {"id": "s", "script": "job.py", "args": ["2"], "cwd": str(tmp_path), "env": {"TIMES": "3"}}
    (request,) = read_runs([row], 5, None)
    found = runs.estimate_apart(request, "H200")
    assert found.get("peak_allocated", found) == 2 * (24 << 20) + 1024, "the values, their gradient, and two scalars"
    failed = runs.estimate_apart(replace(request, args=["two"]), "H200")
    assert "'two'" in failed["failed"] + failed["output"]


def test_peaks_cover_the_whole_run_despite_resets(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import torch\nx = torch.zeros(1 << 22, device='cuda')\ndel x\n"
        "torch.cuda.empty_cache()\ntorch.cuda.reset_peak_memory_stats()\nx = torch.zeros(1 << 20, device='cuda')\n"
    )
    with ullage.virtual_gpu("H200"):
        answer = measure_here({"script": str(script)})
    assert answer["peak_alloc"] == 16 << 20


def test_a_scripts_highest_memory_is_kept_after_its_release(tmp_path, monkeypatch):
    said = iter([7 << 30, 9 << 30, 8 << 30])
    asked_often = threading.Event()

    def read(self):
        if (value := next(said, None)) is None:
            asked_often.set()
        return value

    monkeypatch.setattr(single_run.ProcessMemory, "read", read)
    monkeypatch.setattr(single_run, "process_memory", lambda: 1 << 30)
    script = tmp_path / "job.py"
    script.write_text("import builtins\nassert builtins.asked_often.wait(60)\n")
    monkeypatch.setattr("builtins.asked_often", asked_often, raising=False)
    with ullage.virtual_gpu("H200"):
        answer = measure_here({"script": str(script)})
    assert (answer["nvml_end"], answer["nvml_peak"]) == (1 << 30, 9 << 30)


def test_an_endless_script_is_stopped_and_its_memory_counts(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import torch\nx = torch.zeros(1 << 20, device='cuda')\n"
        "while True:\n    try:\n        y = 1\n    except Exception:\n        pass\n"
    )
    with ullage.virtual_gpu("H200"):
        answer = measure_here({"script": str(script), "stop_after": 0.3})
    assert (answer["stopped"], answer["peak_alloc"]) == (True, 4 << 20)
    (request,) = read_runs([{"id": "s", "script": "job.py", "stop_after": 30}], 5, None)
    assert request.stop_after == 30


def test_a_script_that_fails_after_training_keeps_its_peaks(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import sys, torch\n"
        "weight = torch.zeros(1 << 20, device='cuda', requires_grad=True)\n"
        "optimizer = torch.optim.SGD([weight])\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
        "raise IndexError('no such epoch')\n"
    )
    with ullage.virtual_gpu("H200"):
        answer = measure_here({"script": str(script), "args": ["3"]})
        assert answer["peak_alloc"] >= 2 * 4 << 20  # the weight and its gradient
        assert answer["broke_off"] == "after 3 steps: IndexError: no such epoch"
    with ullage.virtual_gpu("H200"), pytest.raises(IndexError):  # nothing was trained: no answer
        measure_here({"script": str(script), "args": ["0"]})


def test_no_run_starts_before_its_memory_is_free(monkeypatch):
    memory, begun, waits = GpuMemory(100), [], threading.Event()
    wait = memory._changed.wait
    monkeypatch.setattr(memory._changed, "wait", lambda *limit: waits.set() or wait(*limit))
    first = memory.take(60)
    waiter = threading.Thread(target=lambda: (memory.take(50), begun.append("second")))
    waiter.start()
    assert waits.wait(60) and begun == [], "it was asked for, and it waits"
    memory.give_back(first)
    waiter.join(60)
    assert begun == ["second"]
    assert GpuMemory(100).take(500) == 100, "one that needs more than the card has gets the card to itself"


def test_measured_rows_repeat_within_their_bound(monkeypatch):
    def run_here(request, timeout, stop):
        if request.row["id"] == "bad":
            return {"failed": "no such model"}
        with ullage.virtual_gpu("H200"):
            return measure_here({"row": request.row, "iterations": 2, "cap": request.cap})

    monkeypatch.setattr(runs, "measure_apart", run_here)
    monkeypatch.setattr(runs, "apart", lambda entry, asked, *rest: runs.estimate_here(asked))
    requests = [RunRequest(row=ROW), RunRequest(row={**ROW, "id": "bad"})]
    rows = {row["id"]: row for row in runs.measure(requests, "H200", total=1 << 40, at_once=1, cap=True)}
    assert rows["a"]["capped"]["survived"] and rows["a"]["estimate"]["peak_reserved"] == rows["a"]["peak_reserved"]
    assert rows["bad"]["failed"] == "no such model" and "capped" not in rows["bad"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: the run would succeed")
def test_run_that_cannot_be_tried_is_an_answer_with_the_reason():
    assert set(runs.measure_apart(RunRequest(row=ROW))) == {"failed"}


def test_the_same_seed_draws_the_same_readable_runs():
    rows = draw(60, seed=5, avoid={"tv:resnet18"})
    assert rows == draw(60, seed=5, avoid={"tv:resnet18"}) != draw(60, seed=6)
    assert len({row["id"] for row in rows}) == 60 and "tv:resnet18" not in {row["model"] for row in rows}
    for row in rows:
        Model.from_row(row)


def test_an_id_that_comes_twice_is_refused():
    with pytest.raises(InvalidValue, match="a unique id"):
        read_runs([ROW, ROW], 5, None)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["measure"], 2, "Missing argument"),
        (["measure", "nowhere.jsonl"], 2, "no such file"),
        (["measure", "runs.jsonl"], 1, "finds no NVIDIA GPU"),
        (["lab", "draw", "models", "--avoid", "nowhere.jsonl"], 2, "cannot read nowhere.jsonl"),
    ],
)
def test_mistakes_get_one_line(words, code, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs.jsonl").write_text(json.dumps(ROW) + "\n")
    answer = commands.ullage(*words)
    assert answer.returncode == code and text in answer.stderr and "Traceback" not in answer.stderr


def test_the_list_of_runs_needs_no_gpu():
    answer = commands.ullage("lab", "draw", "models", "--count", 4, "--seed", 2)
    assert [json.loads(line)["id"] for line in answer.stdout.splitlines()] == [f"s2n000{n}" for n in range(4)]
