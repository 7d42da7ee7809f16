"""The command line as a person uses it: real processes."""

import json
import subprocess
import sys

import pytest
from tests.commands import ROW, ullage

from ullage import __version__


def test_help_names_the_commands():
    answer = subprocess.run([sys.executable, "-m", "ullage", "--help"], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0
    for command in ("gpus", "evaluate", "diff"):
        assert command in answer.stdout


def test_the_version_is_printed():
    assert ullage("--version").stdout == f"{__version__}\n"


def test_gpus_as_table_and_as_json():
    assert "A100-40GB" in ullage("gpus", "a100").stdout
    cards = json.loads(ullage("gpus", "a100", "--json").stdout)
    assert {"A100-40GB", "A100-80GB"} <= {card["name"] for card in cards}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("gpus", "nothing-like-it"), "no GPU"),
        (("evaluate", "--truth", "/no/such/file"), "cannot read"),
        (("diff", "x", "--truth", "/no/such/file"), "cannot read"),
    ],
)
def test_an_error_is_one_line(words, text):
    answer = ullage(*words)
    assert answer.returncode == 2
    assert text in answer.stderr and "Traceback" not in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


def test_evaluate_compares_with_measured_runs(tmp_path):
    file = tmp_path / "truth.jsonl"
    file.write_text(json.dumps(ROW) + "\n")
    answer = ullage("evaluate", "--truth", file, "--json")
    assert answer.returncode == 0, answer.stderr
    values = json.loads(answer.stdout)
    assert values["rows"][0]["reserved"] == values["rows"][0]["reserved_truth"] == 92274688
    assert {line["figure"] for line in values["summary"]} == {"allocated", "reserved", "process"}
    table = ullage("evaluate", "--truth", file)
    assert "reserved" in table.stdout and "upper holds" in table.stdout


def test_a_broken_line_is_named_by_its_number(tmp_path):
    file = tmp_path / "truth.jsonl"
    file.write_text(json.dumps(ROW) + "\n{broken\n")
    answer = ullage("evaluate", "--truth", file)
    assert answer.returncode == 2 and "line 2" in answer.stderr


def test_diff_names_the_source_of_a_difference_and_only_then(reference, tmp_path):
    truth = reference("groundtruth/h200_train_steps.jsonl")
    rows = [row for row in map(json.loads, truth.read_text().splitlines()) if row.get("events")]
    plain = [row for row in rows if row["model"].startswith("mlp:") and row["precision"] == "fp32"]  # no autocast: its
    row = next(row for row in plain if row["batch"] != 256)  # cache is emptied in the order of addresses
    same = ullage("diff", row["id"], "--truth", truth)
    assert same.returncode == 0 and "no difference" in same.stdout
    wrong = dict(row, batch=256, events=str((truth.parent / row["events"]).resolve()))
    file = tmp_path / "truth.jsonl"
    file.write_text(json.dumps(wrong) + "\n")
    found = ullage("diff", row["id"], "--truth", file)
    assert "first difference" in found.stdout and "->" in found.stdout
