"""Jobs start by the best number at hand, and their promises follow when the estimate comes."""

import asyncio
import json
import signal
import sys
import threading

import pytest
from tests.manager.conftest import answer_of
from tests.manager.test_estimating import user_asks
from tests.manager.test_kills import Keeper, ask

from ullage.manager.core.estimates import Estimates
from ullage.manager.settings import EstimateSettings
from ullage.sandbox.parent import Outcome
from ullage.sandbox.recording import Reads, digest

GIB = 1 << 30
# Takes memory of its card, without the time that PyTorch takes to import.
TAKE = """
import os, sys, time
from ullage.virtual.shared_card.cards import Cards
with open("attempts.log", "a") as log:
    print("start", os.environ["ULLAGE_JOB_ID"], file=log, flush=True)
assert Cards.open(os.environ["ULLAGE_CARDS"]).card(os.environ["CUDA_VISIBLE_DEVICES"]).take(int(sys.argv[1]) << 30)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
"""


class LateAnswers:
    """Stands in for the processes of estimates; by the first argument, each answers when the test says so."""

    def __init__(self, monkeypatch):
        self.asked, self._answers, self._changed = [], {}, threading.Condition()
        monkeypatch.setattr("ullage.manager.core.estimates.run", self._run)

    def _run(self, entry, request, *, stop, env, **more):
        name = request["questions"][0]["args"][0] if "questions" in request else "compare"
        with self._changed:
            self.asked.append(name)
            while name not in self._answers and not stop.is_set():
                self._changed.wait(0.05)
        found = self._answers.get(name, "it was given up")
        if name == "compare":
            return Outcome(answer={"held": found})
        if isinstance(found, str):
            return Outcome(answer={"failed": found, "own": "fails" in found})
        variables = {name: digest(value) for name, value in env.items()}
        return Outcome(answer=answer_of(found), reads=Reads({"train.py": "sha256:0"}, variables))

    def give(self, name, answer):
        with self._changed:
            self._answers[name] = answer
            self._changed.notify_all()


@pytest.fixture
def late(monkeypatch):
    return LateAnswers(monkeypatch)


def train(here, gigabytes, text=TAKE, **more):
    """Submit a script that takes memory and waits for a file."""
    (here.folder / "work/train.py").write_text(text)
    job = {"command": [sys.executable, "train.py", str(gigabytes), "proceed"], "memory": None, "estimator": "ullage"}
    return here.submit("", **job | more)


def measured(here, gigabytes):
    """Run the same script without an estimate, so that what it takes is known."""
    number = train(here, gigabytes, estimator="none")
    here.until(lambda: here.job(number)["used"] == gigabytes * GIB, "its memory to be seen")
    assert here.job(number)["alone"]
    (here.folder / "work/proceed").touch()
    here.until_over(number)
    (here.folder / "work/proceed").unlink()


def running(here, number):
    here.until(lambda: here.job(number)["state"] == "running", f"job {number} to run")


def test_a_job_starts_alone_until_its_estimate_comes(make_here, late):
    here = make_here()
    first = train(here, 2)
    running(here, first)
    job = here.job(first)
    assert job["alone"] and job["estimate"] is None and job["estimating"].startswith("is being estimated, for ")
    second = here.submit("true", memory=4 * GIB)
    here.until(lambda: "belongs to one job alone" in (here.job(second)["reason"] or ""), "the second to wait")
    late.give("2", 5 * GIB)
    assert here.until_over(second)["state"] == "done"
    job = here.job(first)
    assert (job["state"], job["alone"], job["promise"], job["estimating"]) == ("running", False, 5 * GIB, None)
    assert job["estimate"] == "estimated by ullage for A100-40GB"


def test_a_promise_does_not_fall_below_what_is_used(make_here, late):
    here = make_here()
    number = train(here, 3)
    here.until(lambda: here.job(number)["used"] == 3 * GIB, "its memory to be seen")
    late.give("3", GIB)
    here.until(lambda: here.job(number)["estimating"] is None, "its estimate")
    assert (here.job(number)["promise"], here.job(number)["alone"]) == (3 * GIB, False)


def test_a_larger_estimate_than_the_gpu_leaves_a_job_alone(make_here, late):
    here = make_here()
    number = train(here, 1)
    running(here, number)
    late.give("1", 60 * GIB)
    here.until(lambda: here.job(number)["estimating"] is None, "its estimate")
    assert here.job(number)["alone"] and here.job(number)["promise"] < 60 * GIB


def test_a_failed_estimate_stops_no_job_that_runs(make_here, late):
    here = make_here()
    number = train(here, 1)
    running(here, number)
    late.give("1", "train.py fails: ValueError")
    here.until(lambda: here.job(number)["estimating"] is None, "its estimate")
    job = here.job(number)
    assert (job["state"], job["alone"]) == ("running", True)
    assert job["estimate"] == "not estimated: train.py fails: ValueError"


def test_earlier_runs_tell_what_to_promise(make_here):
    here = make_here()
    measured(here, 3)
    again, other = train(here, 3, estimator="none"), train(here, 4, estimator="none")
    running(here, again)
    job = here.job(again)
    assert (job["alone"], job["promise"]) == (False, 3 * GIB + (512 << 20))
    assert job["estimate"] == "measured: 3.00 GiB in an earlier run, plus 512 MiB"
    assert here.job(other)["estimate"] == "not estimated: its submitter wants none", "another command"


def test_a_promise_that_outgrows_its_gpu_stops_no_job(make_here, late):
    here = make_here()
    measured(here, 3)
    again, beside = train(here, 3), here.submit("while [ ! -e proceed ]; do sleep 0.05; done", memory=30 * GIB)
    for number in (again, beside):
        running(here, number)
    late.give("3", 20 * GIB)
    here.until(lambda: here.job(again)["estimating"] is None, "its estimate")
    third = here.submit("true", memory=GIB)
    here.until(lambda: "GPU 0 has the most free, 0 B" in (here.job(third)["reason"] or ""), "the third to wait")
    for number in (again, beside):
        assert here.job(number)["state"] == "running"
        assert "less than its jobs are promised, since an estimate came while its job ran" in here.job(number)["reason"]
    (here.folder / "work/proceed").touch()
    assert {here.until_over(number)["state"] for number in (again, beside, third)} == {"done"}


def test_a_site_may_have_estimates_first(make_here, late):
    here = make_here(estimating={"wait": True})
    number = train(here, 1)
    dry = here.call("dry_run", job={"command": ["python", "train.py", "1"], "cwd": "/", "estimator": "ullage"})
    assert dry["reason"].startswith("its memory is estimated first")
    here.until(lambda: here.job(number)["reason"] == "starts after its estimate", "the reason")
    assert here.job(number)["state"] == "queued"
    late.give("1", 2 * GIB)
    running(here, number)
    assert not here.job(number)["alone"] and here.job(number)["promise"] == 2 * GIB


def test_an_estimate_ends_with_its_job(make_here, late):
    here = make_here()
    number = train(here, 1)
    here.until(lambda: late.asked and here.job(number)["state"] == "running", "its estimate to begin")
    (here.folder / "work/proceed").touch()
    assert here.until_over(number)["state"] == "done"
    here.until(lambda: not here.daemon.intake.estimates.wanted, "its estimate to be given up")


def in_order(requests, first=(), late=(), idle=True, **rules):
    """Who gets an answer, in that order; whose estimates are under way at first, and what is told of those that are not
    made."""
    answered = []

    async def run():
        estimates = Estimates(
            EstimateSettings(**rules), lambda jobs, request, answer: answered.extend(jobs), idle=lambda: idle
        )
        for number, request in enumerate(requests, 1):
            estimates.want(number, request)
        estimates.proceed(first, late)
        under_way = [number for number in estimates.wanted if "is being" in estimates.standing(number)]
        while set(estimates.wanted).difference(late):
            await asyncio.sleep(0.01)
        left = [estimates.standing(number) for number in estimates.wanted]
        await estimates.close()
        return under_way, left

    return (answered, *asyncio.run(run()))


def test_a_job_that_blocks_a_gpu_is_estimated_first():
    requests = [user_asks(number, 1) for number in range(4)]
    answered, _, left = in_order(requests, first=[4], late=[2], at_once=1)
    assert (answered, left) == ([1, 4, 3], ["is not estimated, since the job will have ended before"])


def test_an_estimate_too_late_for_one_job_is_made_for_others():
    same = user_asks(1, 1)
    answered, _, left = in_order([user_asks(0, 1), same, same], late=[2], at_once=1)
    assert (answered, left) == ([1, 2, 3], [])


def test_only_one_estimate_is_made_while_no_core_is_idle():
    requests = [user_asks(number, 1) for number in range(3)]
    answered, under_way, _ = in_order(requests, idle=False, at_once=3)
    assert (under_way, answered) == ([1], [1, 2, 3])
    assert in_order(requests, at_once=2, per_user=2)[1] == [1, 2]


def test_a_job_that_will_have_ended_is_not_estimated(make_here, late):
    here = make_here(estimating={"at_once": 1, "per_user": 1})
    here.daemon.intake.estimates._took.extend([3600.0] * 9)  # seconds that estimates took before
    held, short = train(here, 1, hold=True), train(here, 2, time_limit=600.0)
    said = "is not estimated, since the job will have ended before"
    here.until(lambda: here.job(short)["estimating"] == said, "its estimate to be pointless")
    late.give("1", 2 * GIB)
    here.until(lambda: here.job(held)["estimating"] is None, "the other estimate")
    last = train(here, 3, hold=True)
    late.give("3", 2 * GIB)
    here.until(lambda: here.job(last)["estimating"] is None, "one more estimate")
    assert late.asked == ["1", "3"] and here.job(short)["estimating"] == said
    (here.folder / "work/proceed").touch()
    assert here.until_over(short)["state"] == "done"
    here.until(lambda: not here.daemon.intake.estimates.wanted, "it to be given up")


def test_elements_that_speak_for_a_blocker_are_estimated_first(make_here, late):
    here = make_here(estimating={"at_once": 1, "per_user": 1, "array_samples": 1})
    other = here.submit("while [ ! -e go-on ]; do sleep 0.05; done", memory=GIB)
    running(here, other)
    first, second = train(here, 1, hold=True), train(here, 2, hold=True)
    command = [sys.executable, "train.py", "{index}", "proceed"]
    job = {"command": command, "cwd": str(here.folder / "work"), "estimator": "ullage", "array": [3, 4], "hold": True}
    sample, blocker = here.call("submit", job=job, key="an array of which one element runs")["jobs"]
    here.call("release", jobs=[blocker])
    (here.folder / "work/go-on").touch()
    running(here, blocker)
    assert here.job(blocker)["alone"]
    here.until(lambda: here.job(sample)["estimating"] == "waits to be estimated, as number 1 of 2", "its turn")
    for name in ("1", "2", "3"):
        late.give(name, 2 * GIB)
    here.until(lambda: not any(here.job(number)["estimating"] for number in (first, second, blocker)), "all estimates")
    assert late.asked == ["1", "3", "2"] and not here.job(blocker)["alone"]


def test_a_job_waits_for_the_comparison_with_a_kept_estimate(make_here, late):
    here = make_here()
    late.give("1", 5 * GIB)
    first = train(here, 1, hold=True)
    here.until(lambda: here.job(first)["estimating"] is None, "an estimate to be kept")
    again = train(here, 1)
    here.until(lambda: here.job(again)["estimating"] == "is being compared with earlier estimates", "the comparison")
    here.submit("true", memory=GIB, hold=True)
    assert (here.job(again)["state"], here.job(again)["reason"]) == ("queued", "has just come")
    late.give("compare", 0)
    running(here, again)
    job = here.job(again)
    assert (job["alone"], job["promise"]) == (False, 5 * GIB)
    assert job["estimate"] == "estimated by ullage for A100-40GB (kept from before)"


def test_an_estimate_does_not_undo_a_recovery(make_here, late):
    here = make_here()
    measured(here, 3)
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    fails = f"import os, sys\nif os.environ['ULLAGE_ATTEMPT_NUMBER'] == '1': sys.exit({error!r})\n"
    again = train(here, 3, fails + TAKE)
    here.until(lambda: len(here.job(again)["attempts"]) == 2, "another attempt")
    promise = here.job(again)["promise"]
    late.give("3", 4 * GIB)
    here.until(lambda: here.job(again)["estimating"] is None, "its estimate")
    assert here.job(again)["promise"] == promise > 8 * GIB


# Answers in Ullage's place, once the test has written what.
PLANT = """
import os, sys, time
if "ullage.sandbox" in sys.orig_argv:
    line = ""
    while not line.endswith("\\n"):
        time.sleep(0.02)
        line = open(os.path.join(os.path.dirname(__file__), "answer")).read()
    channel = int(sys.orig_argv[sys.orig_argv.index("ullage.sandbox") + 2])
    os.write(channel, line.encode())
    os._exit(0)
"""
CHANGES = {"shrinks": 4 * GIB, "grows": 30 * GIB}


def measure(home, jobs):
    """Run jobs once, so that what they take is known."""
    home.start()
    numbers = [home.submit(**job, estimator="none") for job in jobs]
    home.until(lambda: all(home.job(number)["used"] for number in numbers), "their memory to be seen")
    home.go()
    for number in numbers:
        home.wait(number)
    (home.work / "proceed").unlink()
    (home.work / "attempts.log").unlink()
    home.kill()


def jobs_of(home, numbers):
    return [ask(home, "status", job=number)[0] for number in numbers]


def all_are(home, numbers, state):
    home.until(lambda: {job["state"] for job in jobs_of(home, numbers)} == {state}, f"all to be {state}")


@pytest.mark.parametrize(
    ("change", "point"),
    [
        pytest.param(change, point, marks=[] if (change, point) == ("shrinks", "revised") else pytest.mark.slow)
        for change in CHANGES
        for point in ("revise-before-commit", "revised")
    ],
)
def test_a_kill_while_a_promise_changes_loses_nothing(home, change, point):
    home.options = ["--virtual", "2xA100-40GB"]
    (home.work / "train.py").write_text(TAKE)
    (home.work / "sitecustomize.py").write_text(PLANT)
    (answer := home.work / "answer").touch()
    env = home.environment()
    env["PYTHONPATH"] = f"{home.work}:{env['PYTHONPATH']}"
    commands = [[sys.executable, "train.py", size, "proceed"] for size in "12"]
    jobs = [{"command": command, "memory": None, "env": env} for command in commands]
    if change == "grows":
        measure(home, jobs)
    with Keeper(home, [point, point]) as keeper:
        revised = [home.submit(**job) for job in jobs]
        all_are(home, revised, "running")
        beside = [home.submit(proceed="proceed", memory=20 * GIB) for _ in revised]
        if change == "grows":
            all_are(home, beside, "running")
        answer.write_text(json.dumps({"answer": answer_of(CHANGES[change])}) + "\n")
        home.until(lambda: len(keeper.ends) == 2, f"the daemon to end at {point} twice")
        home.until(lambda: not any(job["estimating"] for job in jobs_of(home, revised)), "the estimates")
        all_are(home, beside, "running")
        assert [gpu["promised"] for gpu in ask(home, "gpus")] == [CHANGES[change] + 20 * GIB] * 2
        home.go()
        all_are(home, revised + beside, "done")
        ended = jobs_of(home, revised + beside)
    assert keeper.ends == [-signal.SIGKILL] * 2
    assert [len(job["attempts"]) for job in ended] == [1] * 4
    assert [job["attempts"][0]["promise"] for job in ended[:2]] == [CHANGES[change]] * 2
    starts = sorted(line.split()[1] for line in home.log() if line.startswith("start"))
    assert starts == sorted(map(str, revised + beside)) and not any(line.startswith("twice") for line in home.log())
