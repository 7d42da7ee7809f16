"""cuDNN is asked about convolutions on a card of this machine, by a process that a file stands for here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.paths import ROOT

import ullage
from ullage.virtual.call.plan import kernel_switches
from ullage.virtual.cudnn import cudnn_query
from ullage.virtual.cudnn.formulas import NONDETERMINISTIC, TENSOR_CORE, CandidatePlan, ConvolutionProblem

CARD = replace(ullage.gpu("H200"), uuid="GPU-of-this-machine")
MIB = 1 << 20
TENSORS, RANDOM = 1 << TENSOR_CORE, 1 << NONDETERMINISTIC
PLANS = [[1, TENSORS | RANDOM, 96 * MIB], [2, TENSORS, 64 * MIB], [3, 0, 32 * MIB], [4, TENSORS, 256 * MIB]]


class Machine:
    """What this machine's cuDNN would say."""

    def __init__(self, folder: Path) -> None:
        self.told, self.log = folder / "told.json", folder / "log"
        self.says(cudnn=91900, plans=PLANS)

    def says(self, **values: object) -> None:
        self.told.write_text(json.dumps({"log": str(self.log), **values}))

    @property
    def starts(self) -> int:
        return self._lines.count(f"start {CARD.uuid}")

    @property
    def questions(self) -> list[str]:
        return [line for line in self._lines if not line.startswith("start")]

    @property
    def _lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(tmp_path)
    monkeypatch.setenv("ULLAGE_ANSWERS", str(found.told))
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cudnn_query, "ENTRY", "tests.virtual.answering:serve")
    monkeypatch.setattr(cudnn_query, "installed_cudnn", lambda: 91900)
    return found


def odd() -> None:
    """A convolution that is in no table, forward and backward."""
    layer = torch.nn.Conv2d(13, 17, 3, device="cuda")
    layer(torch.zeros(3, 13, 19, 23, device="cuda", requires_grad=True)).sum().backward()


def test_each_problem_is_queried_once_and_its_answer_used(machine: Machine) -> None:
    found = ullage.estimate(odd, gpu=CARD)
    assert machine.starts == 1
    assert [json.loads(question)[0] for question in machine.questions] == ["f", "d", "w"]
    assert found.guessed is not None and found.guessed["workspaces"] == 0
    assert found.guessed["of_bytes"] == 3 * 96 * MIB
    assert "convolution workspaces were asked of cuDNN 9.19 on this card" in found.notes
    assert found.peak_allocated > 96 * MIB


def test_answers_are_remembered_by_version_and_card(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ullage.estimate(odd, gpu=CARD)
    again = ullage.estimate(odd, gpu=CARD)
    assert machine.starts == 1 and again.peak_reserved == first.peak_reserved
    assert "convolution workspaces were asked of cuDNN 9.19 on this card" in again.notes
    monkeypatch.setattr(cudnn_query, "installed_cudnn", lambda: 92000)
    machine.says(cudnn=92000, plans=[[1, 0, 8 * MIB]])
    newer = ullage.estimate(odd, gpu=CARD)
    assert machine.starts == 2 and newer.guessed is not None and newer.guessed["of_bytes"] == 3 * 8 * MIB
    assert len(list((Path(first_folder(machine))).iterdir())) == 2


def first_folder(machine: Machine) -> Path:
    return machine.told.parent / "home" / "cache" / "cudnn"


def test_a_line_that_a_kill_tore_is_asked_again(machine: Machine) -> None:
    ullage.estimate(odd, gpu=CARD)
    (file,) = first_folder(machine).iterdir()
    file.write_text(file.read_text()[:-40])
    found = ullage.estimate(odd, gpu=CARD)
    assert machine.starts == 2 and len(machine.questions) == 4
    assert found.guessed is not None and found.guessed["workspaces"] == 0


@pytest.mark.parametrize(("switch", "bytes_of_each"), [("", 96), ("deterministic", 64), ("allow_tf32", 32)])
def test_the_first_plan_that_the_switches_allow_is_taken(machine: Machine, switch: str, bytes_of_each: int) -> None:
    def train() -> None:
        cudnn = torch.backends.cudnn
        with cudnn.flags(enabled=True, deterministic=switch == "deterministic", allow_tf32=switch != "allow_tf32"):
            odd()

    found = ullage.estimate(train, gpu=CARD)
    assert found.guessed is not None and found.guessed["of_bytes"] == 3 * bytes_of_each * MIB


def test_benchmark_mode_tries_all_plans_and_keeps_the_first(machine: Machine) -> None:
    def train() -> None:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True):
            odd()

    found = ullage.estimate(train, gpu=CARD)
    assert found.peak_allocated > 256 * MIB
    assert found.without_trials is not None and 96 * MIB < found.without_trials["peak_allocated"] < 128 * MIB


def test_only_as_many_plans_are_timed_as_the_program_allows() -> None:
    plans = tuple(CandidatePlan(*plan) for plan in PLANS)
    sizes = (64, 256, 56, 56), (256, 256, 3, 3), (64, 256, 56, 56)
    problem = ConvolutionProblem("f", *sizes, (1, 1), (1, 1), (1, 1), 1, "f32", False)
    with ullage.virtual_gpu("H200"):
        torch.backends.cudnn.benchmark = True
        for limit, largest in ((None, 256), (3, 96), (4, 256), (0, 256)):
            if limit is not None:
                before = kernel_switches()
                torch.backends.cudnn.benchmark_limit = limit
                assert kernel_switches() != before
            tried = cudnn_query.trial(plans, problem, tf32=True, deterministic=False)
            assert tried is not None and tried.larger == 256 * MIB
            assert tried.winner[:2] == (96 * MIB, largest * MIB)


@pytest.mark.parametrize("trouble", [{"error": "no GPU is free"}, {"ends": 1, "plans": PLANS, "cudnn": 91900}])
def test_where_it_fails_the_trees_answer_and_a_note_says_why(machine: Machine, trouble: dict[str, object]) -> None:
    machine.says(**trouble)
    found = ullage.estimate(odd, gpu=CARD)
    assert machine.starts == 1
    assert found.guessed is not None and found.guessed["workspaces"] >= 2
    (note,) = [note for note in found.notes if "could not be asked" in note]
    assert ("no GPU is free" if "error" in trouble else "has ended") in note


def test_answers_of_another_cudnn_release_are_ignored(machine: Machine) -> None:
    machine.says(cudnn=92000, plans=PLANS)
    found = ullage.estimate(odd, gpu=CARD)
    assert found.guessed is not None and found.guessed["workspaces"] == 3
    assert any("cuDNN must be 91900, got 92000 in the process that asks" in note for note in found.notes)


def test_kinds_of_gpus_and_hidden_cards_are_not_queried(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ullage.estimate(odd, gpu="H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = ullage.estimate(odd, gpu=CARD)
    assert machine.starts == 0
    assert found.peak_reserved == hidden.peak_reserved and not any(
        "asked" in note for note in found.notes + hidden.notes
    )


def test_a_build_for_cpus_has_no_cudnn_to_ask(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if torch.version.cuda is None:
        assert cudnn_query.installed_cudnn() is None
        assert cudnn_query.Answers(CARD).of(next(iter(problems()))) is None


def problems() -> list[cudnn_query.ConvolutionProblem]:
    sizes = (1, 3, 8, 8), (16, 3, 3, 3), (1, 16, 8, 8)
    return [cudnn_query.ConvolutionProblem("f", *sizes, (1, 1), (1, 1), (1, 1), 1, "f16", False)]


def test_problems_measured_with_this_version_are_not_queried(machine: Machine) -> None:
    def train() -> None:
        layer = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda")
        layer(torch.zeros(32, 64, 56, 56, device="cuda", requires_grad=True)).sum().backward()

    found = ullage.estimate(train, gpu=CARD)
    assert machine.starts == 0 and found.peak_reserved == ullage.estimate(train, gpu="H200").peak_reserved


@pytest.mark.slow
def test_one_process_serves_a_whole_search(machine: Machine) -> None:
    small = replace(CARD, usable=1200 * MIB)
    found = ullage.max_batch(ullage.Model("tests.virtual.answering:network", input_shape=[5, 19, 23]), gpu=small)
    assert found.trials > 3 and machine.starts == 1
    assert len({json.loads(question)[1][0] for question in machine.questions}) == found.trials


SCRIPT = """
import torch
import ullage.virtual.cudnn.cudnn_query as cudnn_query
cudnn_query.installed_cudnn = lambda: 91900  # as a build for CUDA says
layer = torch.nn.Conv2d(13, 17, 3, device="cuda")
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(4):
    layer(torch.zeros(3, 13, 19, 23, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("warm")
def test_a_script_runs_again_with_the_answers(machine: Machine, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = ullage.estimate(script, gpu=CARD)
    assert machine.starts == 1 and len(machine.questions) == 2
    assert found.guessed is not None and found.guessed["workspaces"] == 0 and found.peak_allocated > 96 * MIB
    assert "convolution workspaces were asked of cuDNN 9.19 on this card" in found.notes
    again = ullage.estimate(script, gpu=CARD)
    assert machine.starts == 1 and again.peak_reserved == found.peak_reserved


@pytest.mark.usefixtures("warm")
def test_a_script_is_estimated_where_cudnn_cannot_be_asked(machine: Machine, tmp_path: Path) -> None:
    machine.says(error="no GPU is free")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = ullage.estimate(script, gpu=CARD)
    assert found.guessed is not None and found.guessed["workspaces"] == 2
    assert any("could not be asked on this card" in note and "no GPU is free" in note for note in found.notes)


@pytest.mark.usefixtures("warm")
def test_a_script_with_unstorable_answers_runs_once(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "cache").write_text("a file where a folder is needed")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = ullage.estimate(script, gpu=CARD)
    assert machine.starts == 1 and len(machine.questions) == 2
    assert any("the answers cannot be kept in" in note for note in found.notes)
