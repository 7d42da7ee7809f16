"""kill -9 at every named transition, twice in a row: nothing is lost, nothing runs twice.

What the jobs themselves wrote is the oracle. A job that nobody interrupted shows exactly one start.
"""

import re
import signal
import threading
from collections import Counter

import pytest

from ullage.errors import NoDaemon
from ullage.manager.crash_points import POINTS, SUPERVISOR_POINTS

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


def over(home, number):
    return ask(home, "status", job=number)[0]["state"] in ("done", "failed", "cancelled")


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
        plain = home.submit()
        blocked = home.submit(proceed="proceed")
        retried = home.script(OUT_OF_MEMORY)
        guessed = [home.submit(["python", "train.py", word], memory=None, hold=True) for word in ("a", "b")]
        cancelled = [home.submit(proceed="never") for _ in range(2)]
        home.until(lambda: len([line for line in home.log() if line.startswith("start")]) >= 6, "all to start")
        for number in cancelled:
            home.until(lambda number=number: cancel_until_over(home, number), "the cancelled job to end")
        home.until(lambda: over(home, plain) and over(home, retried), "the short jobs to end")
        for number in guessed:
            home.until(lambda number=number: ask(home, "status", job=number)[0]["estimate"], "the estimate")
        home.until(lambda: len(keeper.ends) == len(crashes), f"the daemon to end at {point}")
        home.go()
        home.until(lambda: over(home, blocked), "the blocked job to end")
        numbers = [plain, blocked, retried, *guessed, *cancelled]
        jobs = {number: ask(home, "status", job=number)[0] for number in numbers}
    assert keeper.ends == [-signal.SIGKILL] * len(crashes)
    assert [jobs[number]["state"] for number in numbers] == ["done"] * 3 + ["held"] * 2 + ["cancelled"] * 2
    starts = Counter(int(line.split()[1]) for line in home.log() if line.startswith("start"))
    assert starts == {plain: 1, blocked: 1, retried: 2} | dict.fromkeys(cancelled, 1)
    assert not [line for line in home.log() if line.startswith("twice")]
    assert sorted(jobs) == [1, 2, 3, 4, 5, 6, 7], "a repeated submission made no second job"
    for job in jobs.values():
        assert all(attempt["cause"] for attempt in job["attempts"]), "every attempt is recorded with its cause"


def cancel_until_over(home, number):
    ask(home, "cancel", jobs=[number])
    return over(home, number)


@pytest.mark.parametrize("point", SUPERVISOR_POINTS)
def test_a_supervisor_that_is_killed_costs_an_attempt_and_no_more(home, point):
    home.start(crash_at=point)
    number = home.submit()
    home.until(lambda: len(home.job(number)["attempts"]) >= 3, "two attempts to be lost")
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
    endure(home, jobs=60, submitters=2, kills=3, between=1.0)


@pytest.mark.slow
def test_a_thousand_jobs_of_eight_submitters_survive_kills_every_few_seconds(home):
    endure(home, jobs=1000, submitters=8, kills=40, between=4.0)


def endure(home, jobs, submitters, kills, between):
    """All jobs end well and exactly once, whatever happens to the daemon."""
    numbers, failures = [], []

    def submit_some(count):
        try:
            from ullage.manager.client import Client

            client = Client(home.folder)
            for _ in range(count):
                script = 'echo "start $ULLAGE_JOB_ID $ULLAGE_ATTEMPT_NUMBER" >> attempts.log'
                job = {"command": ["/bin/sh", "-c", script], "cwd": str(home.work), "memory": 1 << 30}
                numbers.extend(client.submit(job, patience=60.0)["jobs"])
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
