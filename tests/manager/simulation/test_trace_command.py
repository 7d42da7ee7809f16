"""`ullage trace`: show, generate, convert."""

import json

import pytest
from tests.commands import typed_in
from tests.manager.simulation.test_simulate_command import HEAD, ROW

from ullage.manager.simulation.reading import read_trace


@pytest.fixture
def typed(monkeypatch, capsys):
    return typed_in(monkeypatch, capsys)


def test_a_drawn_trace_is_written_shown_and_simulated(typed, tmp_path):
    file = tmp_path / "jobs.csv"
    code, out, err = typed("trace", "--generate", 30, "--for-gpus", 2, "--load", 1.5, "--users", 3, "--out", file)
    assert code == 0, err
    assert "30 jobs of" in out and out.splitlines()[-1] == f"written: {file}"
    assert len(read_trace(file).jobs) == 30
    _, shown, _ = typed("trace", file, "--json", "--limit", 10)
    assert json.loads(shown)["jobs"] == sum(row["jobs"] for row in json.loads(shown)["kinds"]) == 10
    before = file.read_text()
    code, _, err = typed("trace", "--generate", 5, "--out", file)
    assert code == 2 and "already exists" in err and file.read_text() == before
    assert typed("simulate", file, "--gpus", "2xA100-40GB", "--json")[0] == 0


def test_a_trace_of_another_form_is_converted(typed, tmp_path):
    (tmp_path / "theirs.csv").write_text(HEAD + "".join(ROW.format(number, 60.0 * number) for number in range(4)))
    code, out, err = typed("trace", tmp_path / "theirs.csv", "--out", tmp_path / "ours.json")
    assert code == 0, err
    assert "resnet18 cifar100 b32     4" in out and "0.4 GPUs" not in out
    ours, theirs = read_trace(tmp_path / "ours.json"), read_trace(tmp_path / "theirs.csv")
    assert [(job.arrival, job.work_s, job.kind.memory) for job in ours.jobs] == [
        (job.arrival, job.work_s, job.kind.memory) for job in theirs.jobs
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("/no/such.csv",), "/no/such.csv"),
        ((), "trace needs either a file or --generate N"),
        (("jobs.csv", "--generate", 5), "trace needs either a file or --generate N"),
        (("--generate", 5, "--tail", "short", "--out", "x.csv"), "short"),
        (("--generate", 5, "--out", "x.txt"), "the file name must end in .csv"),
        (("--generate", 5, "--mix", "hevy", "--out", "x.csv"), "did you mean 'heavy'"),
    ],
)
def test_mistakes_are_reported_in_a_line(typed, words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = typed("trace", *words)
    assert code == 2 and said in err and "Traceback" not in err and not list(tmp_path.iterdir())
