"""`ullage lab train` and `ullage evaluate` for gpumemnet as a person uses them, on real files.

The command line runs in this process: to start one with PyTorch takes seconds, and there are many lines to try.
"""

import contextlib
import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tests.lab.synthetic import rows

from ullage.estimation.asking import estimate
from ullage.estimation.estimators.gpumemnet.networks import WIDTHS
from ullage.jobs import Model
from ullage_lab.estimators.gpuutilnet import save
from ullage_lab.train import table7
from ullage_lab.train.fitting import Schedule
from ullage_lab.train.protocol import examples_of, read_rows

pytest.importorskip("polars")


def ullage(*words):
    from ullage.cli import main

    out, err, before, code = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = ["ullage", *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = before
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from ullage_lab.clean.schema import frame, write_dataset

    file = tmp_path_factory.mktemp("data") / "rows.parquet"
    write_dataset(frame(rows(80)), file)
    return file


@pytest.fixture(scope="module")
def busy_data(tmp_path_factory):
    """Perceptrons that are busier the larger their batches are."""
    from ullage_lab.clean.schema import frame, write_dataset

    made = [row | dict.fromkeys(("smact", "smocc", "drama"), row["batch_size"] / 520) for row in rows(90)]
    file = tmp_path_factory.mktemp("busy") / "rows.parquet"
    write_dataset(frame(made), file)
    return file


def test_gpuutilnet_is_trained_and_judged_on_unseen_rows(busy_data, tmp_path) -> None:
    out = tmp_path / "util.safetensors"
    done = ullage("lab", "train", "gpuutilnet", "--data", busy_data, "--out", out, "--epochs", "2", "--json")
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)
    assert [(line["metric"], line["rows"]) for line in lines] == [("smact", 27), ("smocc", 27), ("drama", 27)]
    judged = ullage("lab", "evaluate", "gpuutilnet", "--data", busy_data, "--weights", out, "--json")
    assert judged.returncode == 0, judged.stderr
    assert json.loads(judged.stdout) == lines
    assert "SMOCC" in ullage("lab", "evaluate", "gpuutilnet", "--data", busy_data, "--weights", out).stdout


def test_gpuutilnet_is_trained_on_rows_without_drama(busy_data, tmp_path) -> None:
    """As the authors' tables are."""
    made = [row | {"drama": None} for row in read_rows(busy_data)]
    model = table7.train(made, schedule=Schedule(epochs=1))
    assert [line.metric for line in table7.lines_of(model, made)] == ["smact", "smocc"]
    save(model, tmp_path / "util.safetensors")
    settings = {"widths": [64, 32, 10], "gpuutilnet.weights": str(tmp_path / "util.safetensors")}
    found = estimate(Model("mlp:x", settings=settings), gpu="H200", estimator="gpuutilnet")
    assert list(found.activity) == ["smact", "smocc"]


@pytest.mark.slow
def test_gpuutilnet_learns_the_classes_of_the_paper(busy_data) -> None:
    made = read_rows(busy_data)
    model = table7.train(made, schedule=Schedule(epochs=60, batch=16, rate=0.02))
    for line in table7.lines_of(model, made):
        assert line.accuracy > line.constant, line


def test_gpuutilnet_says_what_is_missing(data, tmp_path) -> None:
    done = ullage("lab", "train", "gpuutilnet", "--data", data, "--out", tmp_path / "x.safetensors")
    assert done.returncode == 2 and "--utilization" in done.stderr
    done = ullage("lab", "evaluate", "gpuutilnet", "--data", data, "--weights", tmp_path / "none.safetensors")
    assert done.returncode == 2 and "ullage lab train gpuutilnet" in done.stderr


def test_train_writes_weights_and_page_and_evaluate_reads_them(data, tmp_path) -> None:
    for estimator in ("mlp", "transformer"):
        out, page = tmp_path / f"gpumemnet_mlp_{estimator}_1gib.safetensors", tmp_path / f"{estimator}.html"
        words = (
            "lab",
            "train",
            "gpumemnet",
            "--data",
            data,
            "--family",
            "mlp",
            "--architecture",
            estimator,
            "--out",
            out,
        )
        done = ullage(*words, "--epochs", "2", "--json", *(("--report", page) if estimator == "mlp" else ()))
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["rows"] == 80 and len(found["figures"]["validation"]) == 3
        assert found["figures"]["test"]["rows"] == 24
        wide = tmp_path / f"gpumemnet_mlp_{estimator}_2gib.safetensors"  # a network for each width of a class
        assert ullage(*words[:-1], wide, "--bin", "2GiB", "--epochs", "2").returncode == 0
        if estimator == "mlp":
            done = ullage(*words[:-1], tmp_path / "alone", "--epochs", "2", "--no-validate", "--json")
            assert json.loads(done.stdout)["figures"]["validation"] == []
            assert json.loads(done.stdout)["figures"]["test"] == found["figures"]["test"], "the same network"
    text = (tmp_path / "mlp.html").read_text()
    assert (
        text.count("<svg") == 3 and "t-SNE" in text and "PCA" in text and "fold 3" in text and "<h1>gpumemnet:" in text
    )
    assert "http" not in text.replace("http://www.w3.org", "")
    judged = ullage("lab", "evaluate", "gpumemnet", "--data", data, "--weights", tmp_path, "--json")
    assert judged.returncode == 0, judged.stderr
    lines = json.loads(judged.stdout)
    expected = [("mlp", 1), ("mlp", 2), ("transformer", 1), ("transformer", 2)]
    there = [pair for pair in expected if pair[1] in WIDTHS["mlp", pair[0]]]
    assert [(line["estimator"], line["bin"] >> 30) for line in lines] == there
    assert all(line["rows"] == 24 and line["paper"] for line in lines), "the held-out rows alone"
    table = ullage("lab", "evaluate", "gpumemnet", "--data", data, "--weights", tmp_path)
    assert "0.950" in table.stdout and "held-out" in table.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("lab", "train", "gpumemnet", "--data", "/no/such.parquet", "--family", "mlp", "--out", "x.safetensors"),
            "must be a Parquet file",
        ),
        (
            ("lab", "train", "gpumemnet", "--data", "DATA", "--family", "cnn", "--out", "x.safetensors"),
            "families in it: mlp",
        ),
        (
            ("lab", "train", "gpumemnet", "--data", "DATA", "--family", "rnn", "--out", "x.safetensors"),
            "no family named",
        ),
        (
            ("lab", "train", "gpumemnet", "--data", "DATA", "--family", "mlp", "--out", "x", "--architecture", "gnn"),
            "mlp or trans",
        ),
        (
            ("lab", "train", "gpumemnet", "--data", "DATA", "--family", "mlp", "--out", "/no/such/folder/x"),
            "cannot write",
        ),
        (
            ("lab", "train", "gpumemnet", "--data", "DATA", "--family", "mlp", "--out", "x", "--bin", "1"),
            "at least 1 MiB",
        ),
        (("lab", "evaluate", "horus"), "must be gpumemnet, gpuutilnet or utilization"),
        (
            ("lab", "evaluate", "gpumemnet", "--data", "DATA", "--weights", "/no/such/folder"),
            "--weights must be a folder",
        ),
    ],
)
def test_an_error_is_one_line(words, text, data) -> None:
    done = ullage(*(data if word == "DATA" else word for word in words))
    assert done.returncode == 2 and text in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_evaluate_still_needs_a_file_of_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "ullage", "evaluate"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "--truth" in done.stderr


@pytest.mark.slow
def test_authors_rows_are_fitted_with_folds_that_do_not_leak(reference) -> None:
    from ullage_lab.train.protocol import read_rows, train

    examples = examples_of(read_rows(reference("reference/gpumemnet_mlp_a100.csv"), "mlp")[::5])
    result = train(examples, family="mlp", estimator="mlp", bin=1 << 30)  # as long as published
    assert result.test.accuracy >= 0.97 and result.card.gpu == "A100-40GB"
