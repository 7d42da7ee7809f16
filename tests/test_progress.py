"""Commands that take long: their rows as they come, progress on standard error, and Ctrl-C keeps what was done."""

import json
import sys

import pytest
from tests.commands import ROW

from ullage.cli.main import main
from ullage.cli.progress import following
from ullage_lab.judge import worker
from ullage_lab.judge.worker import Record


@pytest.fixture
def type_in(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["ullage", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
            raise SystemExit(0)
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out, printed.err

    return run


def answered(name):
    return Record(estimator=name, run="this", gpu="T4", seconds=0.1, figure=1 << 30, kind="process", process=1 << 30)


COMPARE = ("lab", "compare", "torchvision:resnet18", "--gpu", "T4", "--no-measure")


def test_compare_prints_rows_at_once_and_names_the_skipped(type_in, monkeypatch, capsys):
    seen, printed = [], []

    def ask(_, name, *rest):
        printed.append(capsys.readouterr().out)
        seen.append(name)
        return answered(name)

    monkeypatch.setattr(worker, "ask_apart", ask)
    code, _, told = type_in(*COMPARE)
    assert code == 0 and seen[0] == "ullage" and "horus" in seen
    assert "ullage " in printed[1] and "1.00 GiB" in printed[1], "the first row is there before the second question"
    assert not {"xmem", "veritasest"} & set(seen)
    assert "xmem, veritasest" in told and "(--estimators all)" in told


def test_compare_runs_estimators_that_train_on_the_cpu_if_named(type_in, monkeypatch):
    seen = []
    monkeypatch.setattr(worker, "ask_apart", lambda _, name, *rest: seen.append(name) or answered(name))
    for words, expected in (("xmem,horus", ["xmem", "horus"]), ("all", None)):
        seen.clear()
        code, out, told = type_in(*COMPARE, "--estimators", words, "--json")
        assert code == 0 and [each["estimator"] for each in json.loads(out)["estimates"]] == seen
        assert "not asked" not in told
        assert seen == expected if expected else {"xmem", "veritasest", "ullage"} <= set(seen)


def stops_at(number, function):
    """The function; its call of that number is Ctrl-C."""
    calls = []

    def call(*words, **more):
        calls.append(words)
        if len(calls) == number:
            raise KeyboardInterrupt
        return function(*words, **more)

    return call


def test_compare_that_is_stopped_gives_what_was_answered(type_in, monkeypatch):
    monkeypatch.setattr(worker, "ask_apart", stops_at(2, lambda _, name, *rest: answered(name)))
    code, out, told = type_in(*COMPARE, "--json")
    assert code == 130 and [each["estimator"] for each in json.loads(out)["estimates"]] == ["ullage"]
    assert "stopped; asking estimators: 1 of" in told


@pytest.fixture
def truth(tmp_path):
    file = tmp_path / "truth.jsonl"
    file.write_text("".join(json.dumps(ROW | {"id": name}) + "\n" for name in ("one", "two", "three")))
    return file


def test_evaluate_that_is_stopped_gives_what_was_done(type_in, monkeypatch, truth):
    from ullage.measuring import accuracy

    with monkeypatch.context() as patch:
        patch.setattr(accuracy, "compare", stops_at(2, accuracy.compare))
        code, out, told = type_in("evaluate", "--truth", truth, "--json")
        assert code == 130 and [row["id"] for row in json.loads(out)["rows"]] == ["one"]
        assert "estimating: 3 to do" in told and "stopped; estimating: 1 of 3 done" in told
    monkeypatch.setattr(accuracy, "compare", stops_at(1, accuracy.compare))
    assert type_in("evaluate", "--truth", truth)[:2] == (130, "")


@pytest.mark.slow
def test_a_ranking_that_is_stopped_shows_what_was_answered(type_in, monkeypatch, truth):
    from ullage_lab.judge import questions

    real = questions.answers

    def some(*words, **more):
        given = real(*words, **more)
        yield next(given)
        given.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(questions, "answers", some)
    code, out, told = type_in("lab", "evaluate", "--truth", truth, "--estimators", "accelerate", "--json")
    (found,) = json.loads(out)
    assert code == 130 and found["ranking"][0]["asked"] == 1 and "1 of 3 done" in told


def test_an_interrupted_paper_table_has_its_finished_rows(type_in, monkeypatch, tmp_path):
    from ullage_lab.cli import evaluate
    from ullage_lab.train.table2 import Table2Line

    line = Table2Line(
        family="mlp",
        estimator="mlp",
        bin=1 << 30,
        gpu="H200",
        rows=3,
        accuracy=0.5,
        f1=0.5,
        f1_macro=0.5,
        under=0.1,
        over=0.2,
        seconds=0.01,
    )

    def lines(file, weights, retrain, progress):
        yield [line]
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "_lines", lines)
    code, out, _ = type_in("lab", "evaluate", "gpumemnet", "--json")
    assert code == 130 and [each["family"] for each in json.loads(out)] == ["mlp"]
    assert "MLP" in type_in("lab", "evaluate", "gpumemnet")[1]


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys, monkeypatch):
    from ullage.cli import progress

    with following("counting", 3) as going:
        going.step()
        monkeypatch.setattr(progress, "_EVERY", -1.0)
        going.step("the second")
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines()[0] == "counting: 3 to do"
    assert said.err.splitlines()[1].startswith("counting: 2 of 3 done after ") and "the second" in said.err
