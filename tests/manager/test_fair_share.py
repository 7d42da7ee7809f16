"""Fair share: users are charged for the parts of GPUs that their jobs hold, and half of it counts after a half-life."""

import contextlib

import pytest

from ullage.manager.core.usage import FairShare
from ullage.manager.placement import Activity, Slot, claimed
from ullage.manager.storage.database import Database
from ullage.manager.storage.job_store import JobStore
from ullage.manager.storage.records import AttemptRecord, State

HOUR, TOTAL = 3600.0, 40 << 30
DAY = 24 * HOUR


class Site:
    """A store on disk with a clock of its own, and two GPUs."""

    def __init__(self, folder):
        self.now = 0.0
        self.database = Database(folder)
        self.store = JobStore(self.database, clock=lambda: self.now)
        claim = lambda job: claimed(job.option("min_speed"), usual=0.8)  # noqa: E731
        self.share = FairShare(self.store, DAY, clock=lambda: self.now, claim=claim)
        self.busy = 0.0
        self.look()

    def look(self):
        activity = Activity(smact=self.busy, age=0.0)
        slots = [Slot(f"GPU-{number}", number, "A100", TOTAL, activity=activity) for number in range(2)]
        self.share.look(self.store.attempts.values(), slots)

    def start(self, user, promise=None, gpus=("GPU-0",), **asked):
        number = self.store.next_number
        common = {
            "user": user,
            "uid": 1,
            "gid": 1,
            "name": "x",
            "state": State.QUEUED,
            "submitted": self.now,
            "priority": 0,
            "exclusive": promise is None,
            "submission": f"key {number}",
            "spec": {"asked": asked},
        }
        with self.store.transaction():
            for _ in self.store.submit(common, [({"part": 0, "array_index": None}, ())]):
                pass
        attempt = AttemptRecord(
            job=number,
            number=1,
            token=f"token {number}",
            state="running",
            slots=tuple(gpus),
            placed=self.now,
            promise=TOTAL if promise is None else promise,
            exclusive=promise is None,
        )
        self.store.place(self.store.jobs[number], attempt, "")

    def wait(self, seconds, looks=10):
        for _ in range(looks):
            self.now += seconds / looks
            self.look()

    def end_all(self):
        with self.store.transaction():
            for attempt in list(self.store.attempts.values()):
                job = self.store.job(attempt.job)
                self.share.end(attempt, job.user, self.now)
                self.store.end_attempt(attempt, "finished", "", ended=self.now)
                self.store.move(job, "end", State.DONE)

    def usage(self):
        return self.share.usage(self.now)


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    with contextlib.closing(made.database):
        yield made


def test_eight_eighths_of_a_gpu_cost_as_much_as_a_whole_one(site):
    for _ in range(8):
        site.start("ada", promise=TOTAL // 8)
    site.start("bob", gpus=["GPU-1"])
    site.wait(HOUR)
    running = site.usage()
    assert running["ada"] == pytest.approx(running["bob"]) == pytest.approx(HOUR, rel=0.02)
    site.end_all()
    assert site.usage() == pytest.approx(running), "the end changes nothing"


def test_one_eighth_costs_an_eighth_and_two_gpus_cost_two(site):
    site.start("ada", promise=TOTAL // 8)
    site.start("bob", gpus=["GPU-0", "GPU-1"])
    site.wait(HOUR)
    used = site.usage()
    assert used["bob"] / used["ada"] == pytest.approx(16.0)


def test_usage_halves_in_a_half_life_and_survives_a_restart(site, tmp_path):
    site.start("ada")
    site.wait(HOUR)
    site.end_all()
    before = site.usage()["ada"]
    site.now += DAY
    assert site.usage()["ada"] == pytest.approx(before / 2)
    with contextlib.closing(Database(tmp_path)) as database:
        again = FairShare(JobStore(database, clock=lambda: 0.0), DAY)
        assert again.usage(site.now) == pytest.approx(site.usage())


def test_a_small_job_that_keeps_its_gpu_busy_is_charged_for_it(site):
    site.busy = 0.8
    site.start("ada", promise=TOTAL // 10)
    site.wait(HOUR)
    alone = site.usage()["ada"]
    assert alone == pytest.approx(0.8 * HOUR, rel=0.02)
    site.start("bob", promise=TOTAL // 2)
    site.wait(HOUR)
    assert site.usage()["ada"] - alone == pytest.approx(0.4 * HOUR, rel=0.1), "two jobs share what it computes"
    assert site.usage()["bob"] == pytest.approx(0.5 * HOUR, rel=0.02), "what it was promised is more than that"


def test_a_job_with_its_full_speed_is_charged_the_whole_gpu(site):
    for user, min_speed in (("ada", 1.0), ("bob", 0.9), ("eve", 0.8), ("ian", None)):
        site.start(user, promise=TOTAL // 10, min_speed=min_speed)
    site.wait(HOUR)
    parts = [site.usage()[user] / HOUR for user in ("ada", "bob", "eve", "ian")]
    assert parts == pytest.approx([1.0, 0.5, 0.1, 0.1], rel=0.02)


def test_a_daemon_charges_what_a_job_held_for_its_duration(make_here):
    here = make_here()
    total = here.call("gpus")[0]["total"]
    eighth = here.until_over(here.submit("true", memory=total // 8))["attempts"][0]
    account = here.daemon.context.store.accounts[here.call("ping")["you"]]
    assert account.used / (eighth["ended"] - eighth["placed"]) == pytest.approx(1 / 8, rel=0.01)
    whole = here.until_over(here.submit("true", exclusive=True))["attempts"][0]
    more = here.daemon.context.store.accounts[here.call("ping")["you"]].used - account.used
    assert more / (whole["ended"] - whole["placed"]) == pytest.approx(1.0, rel=0.01)
