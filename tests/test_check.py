"""`ullage check`: one line and an exit code."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import ullage
from ullage.cli import app, estimates
from ullage.cli.estimates import judge, parse_margin
from ullage.errors import UllageError
from ullage.estimation.estimators.registry import find
from ullage.jobs.job import JobRequest

GIB = 2**30


def takes(gib, gpu):
    job = JobRequest(lambda: torch.empty(gib * GIB, dtype=torch.uint8, device="cuda"))
    return find("ullage").estimate(job, ullage.gpu(gpu))


def stand_in(request, gpu):
    """A job that takes as many GiB as its batch size says."""
    if request.source == "broken:model":
        raise RuntimeError("the script failed")
    e = takes(request.model.batch_size if request.model else 1, gpu)
    return replace(e, source=request.source, notes=[json.dumps(request.to_row())])


@pytest.fixture
def check(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(estimates, "answer_request", stand_in)

    def run(*words):
        return CliRunner().invoke(app, ["check", *words])

    return run


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("a:job", "--batch-size", "5", "--gpu", "RTX-4060"), 0, "a:job: fits on RTX-4060-8GB: 5.07 of 7.62 GiB, 2."),
        (("a:job", "--batch-size", "9", "--gpu", "RTX-4060"), 1, "a:job: DOES NOT FIT on RTX-4060-8GB"),
        (("a:job", "--batch-size", "5", "--gpu", "RTX-4060", "--margin", "2GiB"), 0, "fits"),
        (("a:job", "--batch-size", "5", "--gpu", "RTX-4060", "--margin", "40%"), 1, "TOO LITTLE ROOM on RTX-4060-8GB"),
        (("a:job", "--batch-size", "7", "--gpu", "RTX-4060", "--upper", "--margin", "500MiB"), 1, "at most 7."),
        (("a:job", "--gpu", "RTX-4O60"), 2, "no GPU named 'RTX-4O60'; did you mean"),
        (("a:job", "--gpu", "/no/such.toml"), 2, "No such file"),
        (("a:job", "--margin", "much"), 2, "--margin must be a size such as 2GiB or a share such as 5%, got 'much'"),
        (("a:job", "--margin", "200%"), 2, "--margin"),
        (("broken:model",), 2, "RuntimeError: the script failed"),
        (("a:job", "--batch-size", "none"), 2, "--batch-size"),
        ((), 2, "Missing argument"),
        (("a:job", "--no-such-option"), 2, "No such option"),
    ],
)
def test_exit_codes_and_words(check, words, code, said):
    answer = check(*words)
    assert answer.exit_code == code, answer.output
    assert said in " ".join(answer.output.split())
    assert "Traceback" not in answer.output
    if code < 2:
        assert len(answer.stdout.splitlines()) == 1


def test_json_and_what_is_handed_on(check):
    answer = check("train.py", "--gpu", "T4", "--steps", "5", "--json", "--", "--epochs", "3")
    values = json.loads(answer.stdout)
    assert answer.exit_code == 0 and values["passed"] is True and values["margin"] == 0 and values["gpu"] == "T4"
    asked = json.loads(values["notes"][0])
    assert asked["run"]["steps"] == 5 and asked["args"] == ["--epochs", "3"]
    assert "timeline" not in values


def test_the_default_gpu_is_named_as_such(check):
    assert "the GPU defaults to H200; name another with --gpu NAME" in check("a:job").stdout
    assert "default" not in check("a:job", "--gpu", "H200").stdout


def test_margins():
    assert parse_margin("12.5 %", 1000) == 125 and parse_margin("0", 1000) == 0
    e = takes(5, "RTX-4060")
    assert judge(e, e.headroom, False)[0] and not judge(e, e.headroom + 1, False)[0]
    with pytest.raises(UllageError):
        parse_margin("-1GiB", 1000)
