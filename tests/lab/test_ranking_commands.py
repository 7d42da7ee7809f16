"""`ullage compare` and `ullage evaluate --estimators` as a person uses them: real processes."""

import json
from pathlib import Path

import pytest
from tests.commands import ROW, ullage

from ullage.errors import InvalidValue, UllageError
from ullage.hardware import gpu as ullage_gpu
from ullage_lab.cli import evaluate
from ullage_lab.cli.ranking import RankingPlan, estimator_list, rank_estimators


@pytest.fixture
def truth(tmp_path):
    file = tmp_path / "truth.jsonl"
    rows = [ROW, ROW | {"id": "broken", "model": "mlp:y", "widths": [784, 10], "act": "NoSuch", "batch": 4}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_ranking_as_json_page_and_table(truth, tmp_path):
    page, kept = tmp_path / "out.html", tmp_path / "kept.jsonl"
    words = ("lab", "evaluate", "--truth", truth, "--estimators", "ullage", "--resume", kept)
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


@pytest.mark.parametrize("names", ["ullage,horus", pytest.param("all", marks=pytest.mark.slow)])
def test_compare_shows_every_estimator_and_the_truth(tmp_path, names):
    file = tmp_path / "truth.jsonl"
    row = {"model": "tv:resnet18", "batch": 2, "input": [3, 32, 32], "peak_alloc": 1 << 28, "peak_reserved": 1 << 29}
    file.write_text(json.dumps(row) + "\n")
    words = ("torchvision:resnet18", "-b", 2, "--input-shape", "3,32,32", "--truth", file, "--json")
    answer = ullage("lab", "compare", *words, "--estimators", names)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert [one["estimator"] for one in found["estimates"]] == estimator_list(names)
    ours = found["estimates"][0]
    assert ours["kind"] == "process" and ours["figure"] > 1 << 28 and ours["seconds"] > 0
    assert found["truth"][0]["reserved"] == 1 << 29
    for one in found["estimates"]:
        assert sum(name in one for name in ("figure", "unsupported", "failed")) == 1


def plan(truth, **values):
    return RankingPlan(truth=truth, **{"estimators": "ullage", "timeout": "1m", "as_json": True} | values)


@pytest.mark.slow
def test_a_running_ranking_shows_its_answers_without_new_ones(truth, tmp_path, capsys):
    kept = tmp_path / "kept.jsonl"
    rank_estimators(plan(truth, estimators="accelerate", resume=kept, sample=["1"]))
    before = kept.read_text()
    capsys.readouterr()
    rank_estimators(plan(truth, estimators="accelerate,horus", resume=kept, cached_only=True))
    (found,) = json.loads(capsys.readouterr().out)
    assert [(line["estimator"], line["asked"]) for line in found["ranking"]] == [("accelerate", 1)]
    assert kept.read_text() == before


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"estimators": "no-such-one"}, "no estimator named"),
        ({"estimators": ""}, "must be 'all' or names"),
        ({"sample": ["some"]}, "--sample must be a number such as 300"),
        ({"sample": ["xmem=3"]}, "not among the estimators"),
        ({"report": Path("/no/such/folder/out.html")}, "cannot write"),
        ({"truth": Path("/no/such/file.csv")}, "cannot read"),
    ],
)
def test_an_error_says_what_was_needed(truth, values, text):
    with pytest.raises(UllageError, match=text):
        rank_estimators(plan(**{"truth": truth} | values))


def test_a_ranking_needs_measured_runs():
    answer = ullage("lab", "evaluate", "--report", "out.html")
    assert answer.returncode == 2
    assert "--truth" in answer.stderr and len(answer.stderr.strip().splitlines()) == 1


def test_where_the_gpu_is_there_the_truth_is_measured(monkeypatch):
    import ullage.hardware
    from ullage.cli.options import request_from
    from ullage.measuring import runs
    from ullage_lab.cli import compare as comparison

    card, orders = ullage_gpu("H200"), []

    def measured(order, timeout=300.0):
        orders.append(order)
        return {"peak_alloc": 5, "peak_reserved": 7, "end_reserved": 6, "nvml_end": 16}

    monkeypatch.setattr(ullage.hardware, "local_gpus", lambda: [card])
    monkeypatch.setattr(runs, "measure_apart", measured)
    job = request_from("torchvision:resnet18", batch_size=2)
    ((name, run),) = comparison._truth(job, job.to_row(), card, None, True)
    assert (name, run.allocated, run.reserved, run.process) == ("measured here, now", 5, 7, 17)
    assert orders[0].row["model"] == "torchvision:resnet18" and orders[0].row["batch"] == 2
    assert comparison._truth(job, job.to_row(), ullage_gpu("T4"), None, True) == [], "another GPU is no truth"
    assert comparison._truth(job, job.to_row(), card, None, False) == []
    script = request_from(__file__, ["--epochs", "1"])
    comparison._truth(script, script.to_row(), card, None, True)
    assert orders[1].script == __file__ and orders[1].args == ["--epochs", "1"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("torchvision:resnet5",), "did you mean 'resnet50'"),
        (("no_such_script.py",), "no_such_script.py does not exist"),
        ((__file__, "--batch-size", "3"), "is an option for a model"),
    ],
)
def test_unsupported_jobs_are_reported_once(words, text):
    answer = ullage("lab", "compare", *words)
    assert answer.returncode == 2
    assert text in answer.stderr and len(answer.stderr.strip().splitlines()) == 1


def test_scores_without_the_shipped_data_say_what_to_type(monkeypatch, tmp_path):
    monkeypatch.setattr(evaluate, "SHIPPED_DATA", tmp_path / "missing.parquet")
    with pytest.raises(InvalidValue, match="ullage lab evaluate gpumemnet --data FILE"):
        evaluate.evaluate_gpumemnet([], None, retrain=False, as_json=False)
