"""Every table fits 80 columns, on a terminal and in a pipe, and keeps the column that matters."""

import pytest

from ullage.cli import jobs
from ullage.cli.job_tables import OVER, QUEUE, table
from ullage.cli.main import app
from ullage.cli.tables import fitted
from ullage.hardware import gpu
from ullage_lab.cli import compare as comparison
from ullage_lab.cli import evaluate, ranking
from ullage_lab.judge.standings import rank
from ullage_lab.judge.truth import MeasuredRun, TruthSet
from ullage_lab.judge.worker import Record
from ullage_lab.train.table2 import Table2Line

LONG = "gpumemnet+transformer"


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def fits(text):
    wide = [line for line in text.splitlines() if len(line.rstrip()) > 80]
    assert not wide, "\n".join(wide)
    return text


def test_the_catalogue_of_gpus():
    from typer.testing import CliRunner

    shown = fits(CliRunner().invoke(app, ["gpus"]).output)
    assert "H100-80GB-MIG-7g.80gb" in shown and "context" in shown and "no room for" in shown
    assert "name in PyTorch" in fits(CliRunner().invoke(app, ["gpus", "A100-40GB"]).output)


def test_a_comparison():
    def record(**more):
        return Record(estimator=LONG, run="this", gpu="H200", seconds=179.0, **more)

    run = MeasuredRun(id="r", row={}, family="cnn", process=1 << 34)
    lines = comparison._Table(gpu("H200"), [("here", run)], [LONG])
    fits(lines.head())
    assert "10.0 GiB" in fits(lines.line(record(figure=10 << 30, kind="process", process=10 << 30)))
    failed = fits(lines.line(record(failed="ValueError: " + "something that takes long to say " * 6)))
    assert failed.count("something") == 6 and len(failed.splitlines()) > 2


def test_a_ranking(capsys):
    runs = [MeasuredRun(id=name, row={}, family=name, process=9 << 30, reserved=8 << 30) for name in ("cnn", "mlp")]
    truth = TruthSet(name="runs of a campaign", gpu="H200", runs=runs)
    records = [
        Record(
            estimator=LONG,
            run=run.id,
            gpu="H200",
            seconds=123.4,
            cpu_seconds=456.7,
            figure=7 << 30,
            kind="process",
            allocated=6 << 30,
            reserved=7 << 30,
            process=7 << 30,
            upper=8 << 30,
        )
        for run in runs
    ]
    shown = fits(ranking._table(rank(truth, records)))
    assert all(name in shown for name in ("estimator", "median", "too low", "time", LONG))
    ranking.print_ranking(truth, records)
    fits(
        "\n".join(
            line for line in capsys.readouterr().out.splitlines() if "second round" not in line and ": " not in line
        )
    )


def test_the_table_of_a_paper(capsys):
    line = Table2Line(
        family="transformer",
        estimator="transformer",
        bin=8 << 30,
        gpu="A100-40GB",
        rows=12345,
        accuracy=0.5,
        f1=0.5,
        f1_macro=0.5,
        under=0.1,
        over=0.2,
        seconds=0.0123,
        paper=0.9,
        paper_f1=0.9,
        validation=0.8,
    )
    evaluate.print_lines([line])
    shown = fits(capsys.readouterr().out)
    assert "paper" in shown and "0.500" in shown and "too low" in shown


def a_job(**more):
    return {
        "id": 123456,
        "array_id": 123456,
        "array_index": 789,
        "user": "somebody-with-a-long-name",
        "ended": None,
        "name": "a-name-that-nobody-would-type-twice-but-that-a-program-makes",
        "state": "running",
        "gpus": 8,
        "promise": 39 << 30,
        "alone": False,
        "estimating": None,
        "places": [0, 1],
        "over_promise": True,
        "used": 41 << 30,
        "cores": 16,
        "host_promise": 256 << 30,
        "ran": 123456.0,
        "waited": 123456.0,
        "recovery": None,
        "reason": None,
        "cause": None,
        "detail": None,
    } | more


def test_the_queue_and_the_history():
    shown = fits(table([a_job()], QUEUE.split(","), 80))
    assert "MORE THAN PROMISED" in " ".join(shown.split())
    over = a_job(ended=1.0, state="failed", cause="out of memory", detail="tried three times, on three GPUs " * 3)
    assert "out of memory: tried three times" in " ".join(fits(table([over], OVER.split(","), 80)).split())


def test_the_gpus_of_the_queue():
    card = {
        "index": 7,
        "name": "NVIDIA RTX PRO 6000 Blackwell",
        "total": 95 << 30,
        "used": 94 << 30,
        "promised": 93 << 30,
        "free": 1 << 30,
        "jobs": list(range(100000, 100012)),
        "lost": False,
        "drained": True,
        "drain_reason": "the fan is loud",
        "bookings": [],
    }
    shown = fits(jobs._gpu_table([card], 80))
    assert "93.0 GiB" in shown and "100011" in shown and "drained" in shown


def test_a_column_that_gives_way_is_named():
    rows = [["a" * 30, "b" * 30, "c" * 30]]
    shown = fits(fitted(["one", "two", "three"], rows, give_way=["two"]))
    assert "c" * 30 in shown and shown.endswith("(no room for two; --json has all)")
    assert "no room" not in fitted(["one", "two", "three"], rows, give_way=["two"], width=100)
