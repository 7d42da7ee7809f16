"""The gate that writes down all answers: what depends on what came before, interruptions, and differences."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.manager.conftest import until

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "benchmarks" / "answers.py"
NETWORKS = """
import os, sys, time
from torch import nn

log, gate = {log!r}, {gate!r}

def made(width):
    with open(log, "a") as file:
        print(width, file=file)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, width), nn.Linear(width, 10))

def steady():
    return made(16)

def growing():
    sys.asked = getattr(sys, "asked", 0) + 1
    return made(16384 * sys.asked)

def waiting():
    while not os.path.exists(gate):
        time.sleep(0.05)
    return made(17)
"""


@pytest.fixture
def runs(tmp_path):
    """A file with three runs. One takes more each time that it is asked for, and one waits for the file `gate`."""
    networks = tmp_path / "networks.py"
    networks.write_text(NETWORKS.format(log=str(tmp_path / "log"), gate=str(tmp_path / "gate")))
    rows = [
        {"id": name, "model": f"{networks}:{name}", "batch": 2, "input": [3, 4, 4], "classes": 10, "opt": "sgd"}
        for name in ("steady", "growing", "waiting")
    ]
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def command(*words):
    return [sys.executable, str(PROGRAM), *map(str, words)]


@pytest.mark.slow  # two programs import PyTorch, each in a process of their own
def test_an_interrupted_run_goes_on_and_names_unsteady_cases(runs, tmp_path):
    out, log = tmp_path / "answers.txt", tmp_path / "log"
    words = command("ask", out, "--runs", runs, "--workers", 2)
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(words, env=env, start_new_session=True, stderr=subprocess.DEVNULL) as began:
        part = out.with_name("answers.txt.part")
        until(lambda: part.exists() and part.read_text().count("\n") == 3, "two of the three cases to be answered")
        os.killpg(began.pid, signal.SIGKILL)
    with part.open("a") as file:
        file.write('["torn')
    before = log.read_text().splitlines()
    (tmp_path / "gate").touch()
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert set(log.read_text().splitlines()[len(before) :]) == {"17"}
    assert done.returncode == 1 and "depends on what came before: runs/growing: peak_allocated" in done.stdout
    lines = [line.split("\t") for line in out.read_text().splitlines()]
    answers = {(name, field): json.loads(value) for name, field, value in lines}
    assert lines == sorted(lines) and {name for name, _ in answers} == {
        f"runs/{r}" for r in ("growing", "steady", "waiting")
    }
    assert isinstance(answers["runs/steady", "upper"], int) and answers["runs/steady", "step_s"] > 0
    grown = answers["runs/growing", "peak_allocated"]
    assert grown["alone"] == grown["first"] < grown["again"]


def test_a_changed_byte_is_found(tmp_path):
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    old.write_text('a\tnotes\t["one", "two"]\na\tupper\t100\nb\tupper\t5\n')
    new.write_text('a\tnotes\t["one", "too"]\na\tupper\t101\nc\tupper\t5\n')
    same, differ = (subprocess.run(command("diff", old, to), capture_output=True, text=True) for to in (old, new))
    assert (same.returncode, same.stdout) == (0, "0 of 2 cases differ\n")
    assert differ.returncode == 1
    assert differ.stdout.splitlines() == [
        "a: notes: ",
        "    -two",
        "    +too",
        "a: upper: 100 -> 101",
        "b: upper: 5 -> not there",
        "c: upper: not there -> 5",
        "3 of 3 cases differ: notes in 1, upper in 3",
    ]


def test_the_cases_of_the_project_can_be_listed(tmp_path):
    words = command("ask", tmp_path / "answers.txt", "--scripts", tmp_path, "--only", "no such case")
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True)
    assert done.returncode == 0 and "0 cases are in" in done.stdout, done.stderr
