"""`ullage compare` and `ullage evaluate --estimators` as a person uses them: real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ullage.cli.evaluate_ranking import Plan, rank_estimators
from ullage.errors import UllageError

ROW = {
    "id": "one", "model": "mlp:x", "widths": [784, 256, 10], "batch": 512, "opt": "sgd", "precision": "fp32",
    "peak_alloc": 73022464, "peak_reserved": 92274688, "end_reserved": 92274688, "nvml_end": 870318080,
}  # fmt: skip


def ullage(*words):
    return subprocess.run(
        [sys.executable, "-m", "ullage", *map(str, words)], capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def truth(tmp_path):
    file = tmp_path / "truth.jsonl"
    rows = [ROW, ROW | {"id": "broken", "model": "mlp:y", "widths": [784, 10], "act": "NoSuch", "batch": 4}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_ranking_as_json_page_and_table(truth, tmp_path):
    page, kept = tmp_path / "out.html", tmp_path / "kept.jsonl"
    words = ("evaluate", "--truth", truth, "--estimators", "ullage", "--resume", kept)
    first = ullage(*words, "--json", "--report", page)
    assert first.returncode == 0, first.stderr
    (found,) = json.loads(first.stdout)
    lines = {line["estimator"]: line for line in found["ranking"]}
    assert list(lines) == ["ullage", "ullage (upper)"] and found["runs"] == 2
    ours = lines["ullage"]
    assert ours["asked"] == 2 and ours["given"] >= 1 and ours["own"]["median"] < 0.05
    assert ours["rounds"]["mended"]["by"]["reserved"] >= 1
    assert "<svg" in page.read_text()
    assert len(kept.read_text().splitlines()) == 2
    second = ullage(*words)
    assert second.returncode == 0 and "PEF" in second.stdout and "ullage (upper)" in second.stdout
    assert len(kept.read_text().splitlines()) == 2, "nothing was asked again"


def test_compare_shows_every_estimator_and_the_truth(tmp_path):
    file = tmp_path / "truth.jsonl"
    row = {"model": "tv:resnet18", "batch": 2, "input": [3, 32, 32], "peak_alloc": 1 << 28, "peak_reserved": 1 << 29}
    file.write_text(json.dumps(row) + "\n")
    words = ("torchvision:resnet18", "-b", 2, "--input-shape", "3,32,32", "--truth", file, "--json")
    answer = ullage("compare", *words)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    import ullage as library

    assert [one["estimator"] for one in found["estimates"]] == library.estimators()
    ours = found["estimates"][0]
    assert ours["kind"] == "process" and ours["figure"] > 1 << 28 and ours["seconds"] > 0
    assert found["truth"][0]["reserved"] == 1 << 29
    for one in found["estimates"]:
        assert sum(name in one for name in ("figure", "unsupported", "failed")) == 1


def plan(truth, **values):
    given = {"gpu": None, "every": 1, "estimators": "ullage", "sample": [], "limit": "1m", "resume": None,
             "report": None, "as_json": True}  # fmt: skip
    return Plan(truth=truth, **given | values)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"estimators": "no-such-one"}, "no estimator named"),
        ({"estimators": ""}, "needed 'all' or names"),
        ({"sample": ["some"]}, "needed a number such as 300"),
        ({"sample": ["xmem=3"]}, "not among the estimators"),
        ({"report": Path("/no/such/folder/out.html")}, "cannot write"),
        ({"truth": Path("/no/such/file.csv")}, "cannot read"),
    ],
)
def test_an_error_says_what_was_needed(truth, values, text):
    with pytest.raises(UllageError, match=text):
        rank_estimators(plan(**{"truth": truth} | values))


def test_options_of_a_ranking_need_estimators(truth):
    answer = ullage("evaluate", "--truth", truth, "--report", "out.html")
    assert answer.returncode == 1
    assert "add --estimators" in answer.stderr and len(answer.stderr.strip().splitlines()) == 1
