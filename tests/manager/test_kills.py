"""kill -9 at every named transition, twice in a row: nothing is lost, nothing runs twice.

What the jobs themselves wrote is the oracle. A job that nobody interrupted shows exactly one start.
"""

import re
import signal
import threading
from collections import Counter

import pytest

from ullage.errors import NoDaemon
from ullage.jobs.job_files import JobSpec
from ullage.manager.client import Client

# In the order in which a job meets them.
POINTS = (
    "submit-before-commit",
    "order-before-commit",
    "submit-before-answer",
    "order-before-answer",
    "estimated-before-commit",
    "estimated",
    "edit-before-commit",
    "edited",
    "place-before-commit",
    "placed",
    "folder-made",
    "order-written",
    "supervisor-started",
    "running-before-commit",
    "running",
    "stop-before-commit",
    "stop-decided",
    "stop-written",
    "stop-sent",
    "over-before-commit",
    "over",
    "notify-before-delivery",
    "notify-delivered",
    "retry-before-commit",
    "requeue-before-commit",
    "requeued",
    "adopt-begun",
    "adopt-revoked",
)
# Inside the process that watches one job; there it is that process which ends.
SUPERVISOR_POINTS = ("supervisor-locked", "supervisor-forked", "supervisor-recorded", "supervisor-waited")

# Fails as PyTorch does when its GPU is full, the first time; needs no PyTorch.
OUT_OF_MEMORY = """
echo "start $ULLAGE_JOB_ID $ULLAGE_ATTEMPT_NUMBER" >> attempts.log
if [ ! -e was-there ]; then
    touch was-there
    echo "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." >&2
    exit 1
fi
"""


class Keeper:
    """Starts the daemon again whenever it ended; the first times it is to end at a point."""

    def __init__(self, home, crashes):
        self.home, self.crashes = home, list(crashes)
        self.ends = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while not self._stop.is_set():
            self.home.start(self.crashes.pop(0) if self.crashes else None, wait=False)
            while self.home.process.poll() is None and not self._stop.is_set():
                self._stop.wait(0.01)
            if self.home.process.poll() is not None:
                self.ends.append(self.home.process.returncode)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()


def ask(home, verb, **arguments):
    """An order that is repeated until a daemon has answered it."""

    def once():
        try:
            return [home.client.call(verb, **arguments)]
        except NoDaemon:
            return None

    return home.until(once, f"an answer to {verb}")[0]


def crashes_for(point):
    # An attempt to be revoked is there only after an end between the book and the supervisor.
    return ["placed", point, point] if point == "adopt-revoked" else [point, point]


@pytest.mark.parametrize("point", POINTS)
def test_nothing_is_lost_and_nothing_runs_twice(home, point):
    home.options = ["--virtual", "2xA100-40GB"]
    home.settings += "[estimating]\ntimeout = 0.05\n"
    (home.work / "train.py").write_text("")
    crashes = crashes_for(point)
    with Keeper(home, crashes) as keeper:
        expected = {home.submit(): ("done", 1)}
        blocked = home.submit(proceed="proceed")
        if point.startswith("retry"):
            expected[home.script(OUT_OF_MEMORY)] = ("done", 2)
        if point.startswith("estimated"):
            expected |= {
                home.submit(["python", "train.py", word], memory=None, hold=True): ("held", 0) for word in "ab"
            }
        if point.startswith("notify"):
            expected[home.submit(on_end=["touch", str(home.work / "told")])] = ("done", 1)
        if point.startswith("edit"):
            expected |= {home.submit(hold=True): ("edited", 0) for _ in range(2)}
        if point.startswith("requeue"):
            expected |= {home.submit(): ("requeued", 1) for _ in range(2)}
        if point.startswith("stop"):
            expected |= {home.submit(proceed="never"): ("cancelled", 1) for _ in range(2)}
        starts = 1 + sum(count for _, count in expected.values())
        home.until(lambda: len([line for line in home.log() if line.startswith("start")]) == starts, "all to start")
        for number, (state, _) in expected.items():
            home.until(lambda number=number, state=state: settled(home, number, state), f"job {number} to be {state}")
        blocked = [blocked]
        while point.startswith(("running", "over")) and len(keeper.ends) < len(crashes):
            # Two jobs may have been seen in one look, so there may be a need for another one.
            blocked.append(home.submit(proceed="proceed" if point.startswith("running") else None))
            home.until(lambda: settled(home, blocked[-1], "running") or settled(home, blocked[-1], "done"), "one more")
        home.until(lambda: len(keeper.ends) == len(crashes), f"the daemon to end at {point}")
        home.go()
        for number in blocked:
            expected[number] = ("done", 1)
            home.until(lambda number=number: settled(home, number, "done"), "the blocked job to end")
        if point.startswith("notify"):
            home.until((home.work / "told").exists, "the end to be told")
        jobs = {number: ask(home, "status", job=number)[0] for number in expected}
        everything = ask(home, "queue") + ask(home, "history")
    assert keeper.ends == [-signal.SIGKILL] * len(crashes)
    states = {number: _STATES.get(state, state) for number, (state, _) in expected.items()}
    assert {number: job["state"] for number, job in jobs.items()} == states
    seen = Counter(int(line.split()[1]) for line in home.log() if line.startswith("start"))
    assert seen == {number: count for number, (_, count) in expected.items() if count}
    assert not [line for line in home.log() if line.startswith("twice")]
    assert len(everything) == len(expected), "a repeated submission made no second job"
    for job in jobs.values():
        assert all(attempt["cause"] for attempt in job["attempts"]), "every attempt is recorded with its cause"


_STATES = {"edited": "held", "requeued": "held"}  # after what was done to it


def settled(home, number, state):
    """Whether a job is where it should end up, after what has to be done for that."""
    if state == "edited":
        ask(home, "edit", jobs=[number], changes={"priority": 7, "time_limit": 60.0})
        job = ask(home, "status", job=number)[0]
        return (job["priority"], job["time_limit"]) == (7, 60.0)
    if state == "requeued":
        if ask(home, "status", job=number)[0]["state"] == "done":
            ask(home, "requeue", jobs=[number], hold=True)
        return ask(home, "status", job=number)[0]["state"] == "held"
    if state == "cancelled":
        ask(home, "cancel", jobs=[number])
    job = ask(home, "status", job=number)[0]
    return job["state"] == state and (state != "held" or job["estimate"])


@pytest.mark.parametrize("point", SUPERVISOR_POINTS)
def test_a_killed_supervisor_costs_one_attempt(home, point):
    home.start(crash_at=point)
    number = home.submit()
    home.until(lambda: len(home.job(number)["attempts"]) >= 2, "an attempt to be lost")
    home.kill()
    home.start()
    job = home.wait(number)
    assert job["state"] == "done"
    lost = {attempt["cause"] for attempt in job["attempts"][:-1]}
    assert lost <= {"watching process lost", "not started"}
    assert not [line for line in home.log() if line.startswith("twice")]
    ended = len([line for line in home.log() if re.match(r"end ", line)])
    assert ended >= 1 if point == "supervisor-waited" else ended == 1


def test_many_jobs_of_several_submitters_survive_kills(home):
    endure(home, jobs=30, submitters=2, kills=3, between=0.5)


@pytest.mark.slow
def test_a_thousand_jobs_of_eight_submitters_survive_kills(home):
    endure(home, jobs=1000, submitters=8, kills=40, between=4.0)


def endure(home, jobs, submitters, kills, between):
    """All jobs end well and exactly once, whatever happens to the daemon."""
    numbers, failures = [], []

    def submit_some(count):
        try:
            client = Client(home.folder)
            for _ in range(count):
                script = 'echo "start $ULLAGE_JOB_ID $ULLAGE_ATTEMPT_NUMBER" >> attempts.log'
                spec = JobSpec(command=["/bin/sh", "-c", script], cwd=str(home.work), memory=1 << 30)
                numbers.extend(client.submit_spec(spec, patience=60.0)["jobs"])
        except BaseException as error:
            failures.append(error)

    with Keeper(home, []) as keeper:
        threads = [threading.Thread(target=submit_some, args=(jobs // submitters,)) for _ in range(submitters)]
        for thread in threads:
            thread.start()
        done = threading.Event()
        for _ in range(kills):
            home.until(home.answers, "a daemon")
            done.wait(between)  # not a synchronisation: it only spreads the kills
            if home.process.poll() is None:
                home.process.kill()
        for thread in threads:
            thread.join()
        assert not failures
        home.until(lambda: not ask(home, "queue"), "all jobs to end")
        history = ask(home, "history", limit=jobs + 10)
    assert len(keeper.ends) >= kills
    assert sorted(numbers) == sorted(job["id"] for job in history) and len(set(numbers)) == jobs
    assert {job["state"] for job in history} == {"done"}
    assert Counter(int(line.split()[1]) for line in home.log()) == dict.fromkeys(numbers, 1)
