"""`ullage measure cudnn`: which convolutions are asked about, and how answers are kept. The questions need a GPU."""

import json
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.commands import typed_in
from tests.commands import ullage as run

import ullage
from ullage.measuring import cudnn as asking
from ullage.virtual.cudnn import backend
from ullage.virtual.cudnn.backend import Cudnn, CudnnError
from ullage.virtual.cudnn.formulas import DOWN_CONVERT, NONDETERMINISTIC, TENSOR_CORE, CandidatePlan
from ullage_lab.draw import convolutions as drawing
from ullage_lab.draw.layers import ConvolutionLayer

LAYER = ConvolutionLayer((8, 9, 9), (8, 16, 4, 4), (2, 2), (1, 1), (1, 1), True, (0, 0), 1)


def test_transposed_layer_is_the_data_gradient_of_its_original() -> None:
    forward, back, weight = drawing.problems_of(LAYER, 2, "f16", "cl")
    assert (forward.direction, back.direction, weight.direction) == ("d", "f", "w")
    assert forward.source == (2, 16, 18, 18) and forward.out == (2, 8, 9, 9)
    assert all(problem.channels_last for problem in (forward, back, weight))


def test_depthwise_layers_of_pytorchs_own_kernels_are_skipped() -> None:
    depthwise = ConvolutionLayer((8, 9, 9), (8, 1, 3, 3), (1, 1), (1, 1), (1, 1), False, (0, 0), 8)
    assert drawing.problems_of(depthwise, 2, "f32", "c") == []
    assert len(drawing.problems_of(depthwise, 2, "f32", "cl")) == 3


def test_random_problems_are_drawn_by_the_seed() -> None:
    assert drawing.random_problems(40, 1) == drawing.random_problems(40, 1) != drawing.random_problems(40, 2)


def test_a_script_is_followed_for_its_problems(tmp_path: Path, warm: None) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "layer = torch.nn.Conv2d(3, 8, 3).cuda()\n"
        "layer(torch.zeros(int(sys.argv[1]), 3, 8, 8, device='cuda')).sum().backward()\n"
    )
    assert {problem.source[0] for problem in asking.problems_of_script(script, ["5"])} == {5}


def test_a_script_that_is_followed_changes_no_file(tmp_path: Path, warm: None) -> None:
    script, weights = tmp_path / "train.py", tmp_path / "weights.pt"
    weights.write_text("of three weeks")
    script.write_text(
        "import torch\n"
        "layer = torch.nn.Conv2d(3, 8, 3).cuda()\n"
        "layer(torch.zeros(2, 3, 8, 8, device='cuda')).sum().backward()\n"
        f"torch.save(layer.state_dict(), {str(weights)!r})\n"
    )
    assert asking.problems_of_script(script, [])
    assert weights.read_text() == "of three weeks"


def test_a_file_that_holds_no_answers_is_left_as_it_is(tmp_path: Path) -> None:
    for text in ("a diary\nwithout an end", '{"one": "document"\n}'):
        diary = tmp_path / "diary.txt"
        diary.write_text(text)
        with pytest.raises(ullage.UllageError, match="line 1: not JSON"):
            asking.asked_before(diary)
        assert diary.read_text() == text


def test_stored_answers_are_not_computed_again(tmp_path: Path) -> None:
    path, problems = tmp_path / "plans.jsonl", drawing.problems_of(LAYER, 2, "f32", "c")
    row = {"problem": problems[0], "candidates": [CandidatePlan(1, 0, 512)]}
    path.write_text(json.dumps(row) + "\n" + json.dumps({"problem": problems[1]})[:20])  # the last line was cut off
    assert asking.asked_before(path) == {problems[0]}


def test_plans_are_left_out_as_pytorch_does() -> None:
    def allowed(note: int, kind: str = "f32", **switches: bool) -> bool:
        return CandidatePlan(1, 1 << note, 0).allowed(kind, **switches)

    assert not allowed(DOWN_CONVERT)
    assert allowed(TENSOR_CORE) and not allowed(TENSOR_CORE, tf32=False)
    assert allowed(TENSOR_CORE, kind="bf16", tf32=False)
    assert allowed(NONDETERMINISTIC) and not allowed(NONDETERMINISTIC, deterministic=True)


def test_cudnn_is_asked_on_a_real_gpu_only() -> None:
    with ullage.virtual_gpu("H200"), pytest.raises(CudnnError, match="NVIDIA GPU"):
        Cudnn()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    answer = run("measure", "cudnn", listed(tmp_path, 3), "--out", str(tmp_path / "plans.jsonl"))
    assert answer.returncode == 1 and "PyTorch finds no NVIDIA GPU" in answer.stderr
    assert not (tmp_path / "plans.jsonl").exists()
    answer = run("measure", "cudnn")
    assert answer.returncode == 2 and "needs a script or a file of problems" in answer.stderr
    answer = run("measure", "cudnn", "nowhere.jsonl")
    assert answer.returncode == 2 and "no such file" in answer.stderr
    printed = run("measure", "cudnn", listed(tmp_path, 3), "--dry-run").stdout.splitlines()
    assert [len(json.loads(line)["problem"]) for line in printed] == [10, 10, 10]


def listed(folder: Path, count: int) -> Path:
    """A file of so many problems, as the lab draws them."""
    file = folder / f"problems-{count}.jsonl"
    file.write_text(run("lab", "draw", "problems", "--random", str(count)).stdout)
    return file


OWN = {"deviceVer": 900, "deviceName": "NVIDIA H200", "multiProcessorCount": 132, "totalGlobalMem": 1, "warpSize": 32}


def test_another_architecture_keeps_this_machines_description() -> None:
    told = {name: json.loads(asking.described(OWN, name)) for name in asking.architectures("all")}
    assert [row["deviceVer"] for row in told.values()] == [750, 800, 860, 890, 900, 1000, 1200]
    assert all(row.keys() == OWN.keys() and row["warpSize"] == 32 for row in told.values())
    assert told["sm_75"]["deviceName"] == "Tesla T4" and told["sm_75"]["multiProcessorCount"] == 40
    with pytest.raises(ullage.UllageError, match="sm_81"):
        asking.architectures("sm_80,sm_81")


def test_every_architecture_has_a_file_of_its_own_and_goes_on(tmp_path: Path, monkeypatch, capsys) -> None:
    asked: list[str] = []

    def ask(problems, workers, description):
        for problem in problems:
            asked.append(json.loads(description)["deviceName"])
            yield {"problem": problem, "candidates": []}
            if len(asked) == 5:
                raise KeyboardInterrupt

    monkeypatch.setattr(backend, "Cudnn", lambda description: SimpleNamespace(description=lambda: OWN))
    monkeypatch.setattr(asking, "ask", ask)
    typed = typed_in(monkeypatch, capsys)
    words = (
        "measure",
        "cudnn",
        listed(tmp_path, 4),
        "--architecture",
        "sm_75,sm_80",
        "--out",
        tmp_path / "plans.jsonl",
    )
    code, _, _ = typed(*words)
    assert code != 0
    code, out, _ = typed(*words)
    assert code == 0 and "plans-sm_80.jsonl" in out
    assert asked == ["Tesla T4"] * 4 + ["NVIDIA A100-SXM4-40GB"] * 4
    for name in ("sm_75", "sm_80"):
        assert len((tmp_path / f"plans-{name}.jsonl").read_text().splitlines()) == 4


def test_a_crash_of_cudnn_on_one_architecture_spares_the_others(tmp_path, monkeypatch, capsys) -> None:
    def ask(problems, workers, description):
        if json.loads(description)["deviceVer"] == 1000:
            raise CudnnError("cuDNN 91900 ended the process that asked about NVIDIA B200")
        yield from ({"problem": problem, "candidates": []} for problem in problems)

    monkeypatch.setattr(backend, "Cudnn", lambda description: SimpleNamespace(description=lambda: OWN))
    monkeypatch.setattr(asking, "ask", ask)
    words = (
        "measure",
        "cudnn",
        listed(tmp_path, 2),
        "--architecture",
        "sm_100,sm_120",
        "--out",
        tmp_path / "plans.jsonl",
    )
    code, out, _ = typed_in(monkeypatch, capsys)(*words)
    assert code == 0 and "ended the process" in out
    assert len((tmp_path / "plans-sm_120.jsonl").read_text().splitlines()) == 2


def test_a_process_that_cudnn_ends_is_an_error_of_cudnn(monkeypatch) -> None:
    class Dying:
        def __init__(self, *given, **named) -> None: ...
        def __enter__(self):
            return self

        def __exit__(self, *error) -> None: ...
        def map(self, *given):
            raise BrokenProcessPool

    monkeypatch.setattr(asking, "Cudnn", lambda description: SimpleNamespace(version=91900))
    monkeypatch.setattr(asking, "ProcessPoolExecutor", Dying)
    with pytest.raises(CudnnError, match="91900 ended the process that asked about NVIDIA B200"):
        list(asking.ask([], description=asking.described(OWN, "sm_100")))


def test_without_a_gpu_no_architecture_is_asked_about(tmp_path: Path, monkeypatch, capsys) -> None:
    typed = typed_in(monkeypatch, capsys)
    code, _, err = typed(
        "measure", "cudnn", listed(tmp_path, 4), "--architecture", "all", "--out", tmp_path / "p.jsonl"
    )
    assert code == 1 and "GPU" in err and "Traceback" not in err
    assert not (tmp_path / "p.jsonl").exists()
    code, _, err = typed(
        "measure", "cudnn", listed(tmp_path, 4), "--architecture", "sm_1", "--out", tmp_path / "p.jsonl"
    )
    assert code == 2 and "sm_1" in err
