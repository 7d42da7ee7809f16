"""Estimates on the way in: in a process of their own, within limits, kept by content."""

import asyncio
import dataclasses
import os
import sys
import time

import pytest

from ullage.isolation import parent
from ullage.isolation.process_identity import start_of
from ullage.manager.core.estimates import Estimates, Question, Wanted, key_of, questions_of, script_of
from ullage.manager.settings import Estimating
from ullage.workloads.job_files import JobSpec

TRAIN = """
import sys, torch
model = torch.nn.Linear(512, int(sys.argv[1])).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(8, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_is_estimated_once_and_then_kept(home):
    home.options = ["--virtual", "1xA100-40GB"]
    home.start()
    (home.work / "train.py").write_text(TRAIN)
    job = {"command": [sys.executable, "train.py", "512"], "memory": None, "hold": True, "env": home.environment()}
    first, again = home.submit(**job), home.submit(**job)
    assert home.job(first)["need"] is None and home.job(first)["estimate"] is None
    home.until(lambda: home.job(first)["estimate"] and home.job(again)["estimate"], "the estimate")
    found = home.job(first)
    assert found["estimate"] == "estimated by ullage for A100-40GB"
    assert 400 << 20 < found["need"] < 2 << 30
    third = home.submit(**job)
    assert home.job(third)["need"] == found["need"] and home.job(third)["estimate"].endswith("(kept from before)")
    (home.work / "train.py").write_text(TRAIN + "# changed\n")
    assert home.job(home.submit(**job))["estimate"] is None, "other content is estimated anew"


def test_a_failed_estimate_is_said_and_the_job_is_placed_by_the_rule_for_unknowns(home):
    home.options = ["--virtual", "2xA100-40GB"]
    home.settings += "[estimating]\ntimeout = 0.05\n"
    home.start()
    (home.work / "train.py").write_text("")
    job = home.wait(home.submit([sys.executable, "train.py"], memory=None))
    assert job["state"] == "done" and job["need"] is None
    assert job["estimate"] == "not estimated: it took longer than 50 ms"
    assert job["attempts"][0]["exclusive"], "the default rule for unknowns is a GPU for itself"


def test_what_cannot_be_estimated_is_queued_with_that_said(common):
    number = common.script("true", memory=None, estimator="ullage")
    assert common.job(number)["estimate"] == "not estimated: no Python script or model in it (--memory tells how much)"
    assert common.wait(number)["attempts"][0]["exclusive"]
    assert common.job(common.script("true", memory=None))["estimate"] == "not estimated: this site wants none"


def make(wanted, **rules):
    """The answer to one estimate."""
    answers = []

    async def run():
        estimates = Estimates(Estimating(**rules), answers.append)
        estimates.want(wanted)
        while not answers:
            await asyncio.sleep(0.01)

    asyncio.run(run())
    return answers[0]


def wanted(tmp_path, text, estimator="ullage"):
    (tmp_path / "train.py").write_text(text)
    question = Question(str(tmp_path / "train.py"))
    return Wanted("key", estimator, [question], ["T4"], dict(os.environ), str(tmp_path), {})


def test_limits_and_failures_of_the_process_are_told(tmp_path):
    answer = make(wanted(tmp_path, "import time; time.sleep(1000)"), memory=1 << 20)
    assert (answer.upper, answer.note) == (
        None, "not estimated: it took more than 1.00 MiB of this machine's memory"
    )  # fmt: skip
    missing = dataclasses.replace(wanted(tmp_path, ""), cwd=str(tmp_path / "nowhere"))
    assert make(missing).note == "not estimated: No such file or directory"


def test_an_estimate_that_is_given_up_ends(tmp_path, monkeypatch):
    begun = []

    start = parent.start

    def remember(*args, **options):
        begun.append(start(*args, **options))
        return begun[0]

    async def run():
        work = Estimates(Estimating(), lambda answer: begun.append(answer))
        work.want(wanted(tmp_path, "import time; time.sleep(1000)"))
        while not begun:
            await asyncio.sleep(0.01)
        await work.close()

    monkeypatch.setattr(parent, "start", remember)
    asyncio.run(run())
    assert len(begun) == 1 and start_of(begun[0].pid) is None, "nobody is told, and nothing is left"


def test_an_estimator_that_is_not_ours_says_what_it_does_not_support(tmp_path):
    answer = make(wanted(tmp_path, "", estimator="horus"))
    assert answer.upper is None and "horus" in answer.note


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["python3.11", "-u", "-X", "dev", "train.py", "-m", "x"], ("train.py", ["-m", "x"], False)),
        (["/venv/bin/python", "-m", "train"], ("train", [], True)),
        (["./train.py", "--lr", "1"], ("./train.py", ["--lr", "1"], False)),
        (["torchrun", "--nproc_per_node", "1", "train.py"], ("train.py", [], False)),
        (["bash", "train.sh"], None),
        (["python", "-c", "1"], None),
        (["python"], None),
        (["torchrun", "--help"], None),
    ],
)
def test_the_script_of_a_command_is_found(command, found):
    assert script_of(command) == found


def test_a_key_follows_what_memory_follows_from(tmp_path):
    (tmp_path / "train.py").write_text("import model")
    (tmp_path / "model.py").write_text("a")

    def key(args=(), env=None, gpus=("T4",), estimator="ullage"):
        spec = JobSpec(command=["python", "train.py", *args], cwd=str(tmp_path))
        return key_of(questions_of(spec), estimator, gpus, env or {}, str(tmp_path))

    first = key()
    assert key() == first and key(env={"SHELL": "x"}) == first
    others = {key(["--b"]), key(env={"PYTORCH_ALLOC_CONF": "x"}), key(gpus=["H200"]), key(estimator="horus")}
    (tmp_path / "model.py").write_text("b")
    assert len(others | {first, key()}) == 6


def test_a_pipe_or_a_great_folder_does_not_hold_up_the_daemon(tmp_path):
    os.mkfifo(tmp_path / "train.py")
    for number in range(300):
        (tmp_path / f"d{number}").mkdir()
    began = time.monotonic()
    spec = JobSpec(command=["python", "train.py"], cwd=str(tmp_path))
    assert key_of(questions_of(spec), "ullage", ["T4"], {}, str(tmp_path))
    assert time.monotonic() - began < 30
