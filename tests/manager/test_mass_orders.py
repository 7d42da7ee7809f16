"""Orders for thousands of jobs: one transaction each, and others are answered meanwhile."""

import asyncio
import signal
import threading

import pytest

from ullage.errors import NoDaemon
from ullage.manager.core import scheduler
from ullage.manager.storage import group_commit
from ullage.manager.storage.group_commit import GroupCommit
from ullage.manager.storage.history import JobHistory
from ullage.manager.storage.records import State

MANY = 300


def submit(store, key="an array of many", many=MANY):
    common = {
        "user": "ada",
        "uid": 1,
        "gid": 1,
        "name": "x",
        "state": State.QUEUED,
        "submitted": 0.0,
        "priority": 0,
        "exclusive": False,
        "submission": key,
        "spec": {"asked": {"command": ["a", "{index}"]}},
    }
    parts = [({"part": number, "array_index": number + 1}, ()) for number in range(many)]
    return (yield from store.submit(common, parts))


def hold_all(store):
    for job in list(store.jobs.values()):
        store.move(job, "hold", State.HELD)
        yield


def do(store, *works):
    """What the works give, together with how often another task had its turn meanwhile."""

    async def both():
        turns, done = 0, asyncio.Event()

        async def others():
            nonlocal turns
            while not done.is_set():
                await asyncio.sleep(0)
                turns += 1
                seen.append({job.state for job in store.jobs.values()})

        seen: list[set[State]] = []
        watching = asyncio.create_task(others())
        together = GroupCommit(store)
        found = await asyncio.gather(*(together.do(work) for work in works), return_exceptions=True)
        done.set()
        await watching
        return found, turns, seen

    return asyncio.run(both())


def test_thousands_of_changes_are_one_atomic_commit(store, monkeypatch):
    monkeypatch.setattr(group_commit, "SLICE", 0.0)
    do(store, lambda: submit(store))
    store.database.commits = 0
    _, turns, seen = do(store, lambda: hold_all(store))
    assert store.database.commits == 1 and turns >= MANY, "others had their turn between any two jobs"
    assert all(len(states) == 1 for states in seen) and seen[-1] == {State.HELD}
    assert {job.state for job in JobHistory(store.database).not_over()} == {State.HELD}
    assert store.last_event == 2 * MANY == len(store.history.events(0, 10_000))


def test_a_mass_order_that_fails_has_changed_nothing(store):
    do(store, lambda: submit(store))

    def broken():
        yield from hold_all(store)
        raise ZeroDivisionError

    found, _, _ = do(store, broken)
    assert isinstance(found[0], ZeroDivisionError)
    assert {job.state for job in store.jobs.values()} == {State.QUEUED} and store.last_event == MANY


def test_an_array_keeps_what_was_asked_for_once(store):
    do(store, lambda: submit(store), lambda: submit(store, "another one"))
    assert store.database.rows("SELECT count(*) AS number FROM specs")[0]["number"] == 2
    jobs = JobHistory(store.database).not_over()
    assert len({id(job.spec) for job in jobs}) == 2
    assert [job.request["command"] for job in jobs[:2]] == [["a", "1"], ["a", "2"]]


def test_one_of_an_array_can_ask_for_something_else(store):
    do(store, lambda: submit(store, many=2))
    first, second = store.jobs.values()
    store.update(first, spec={"asked": {"command": ["b"]}})
    for jobs in (list(store.jobs.values()), JobHistory(store.database).not_over()):
        assert [job.request["command"] for job in jobs] == [["b"], ["a", "2"]]


@pytest.mark.parametrize(("point", "after"), [("order-before-commit", "queued"), ("order-before-answer", "held")])
def test_a_killed_daemon_did_all_of_a_mass_order_or_nothing(home, point, after):
    home.options = ["--virtual", "1xA100-40GB", "--estimator", "none"]
    home.start()
    blocker = home.submit(proceed="proceed", exclusive=True)
    home.wait(blocker, "running")
    first = home.submit(exclusive=True, array=f"1-{MANY}")
    home.kill()
    home.start(crash_at=point)
    with pytest.raises(NoDaemon):
        home.client.hold(f"{first}_all")
    assert home.process.wait() == -signal.SIGKILL
    home.start()
    assert [job["state"] for job in home.client.queue() if job["array_id"]] == [after] * MANY
    last = {"job": first + MANY - 1, "reference": f"{first}_{MANY}", "done": True, "text": "cancelled"}
    assert home.client.cancel(f"{first}_all")[-1] == last
    assert [job["id"] for job in home.client.queue()] == [blocker]


def test_an_order_during_a_pass_of_the_scheduler_takes_effect(make_here, monkeypatch):
    thinking, go_on, real = threading.Event(), threading.Event(), scheduler.decide

    def slow(*arguments, **more):
        thinking.set()
        go_on.wait(60)
        return real(*arguments, **more)

    here = make_here()
    monkeypatch.setattr(scheduler, "decide", slow)
    cancelled, drained = here.submit("echo never"), here.submit("echo never")
    assert thinking.wait(60)
    here.call("cancel", jobs=[cancelled])
    here.call("drain", gpu=0)
    go_on.set()
    here.until(lambda: "drained" in (here.job(drained)["reason"] or ""), "the other one to wait for the GPU")
    assert here.job(cancelled)["attempts"] == here.job(drained)["attempts"] == []
    here.call("cancel", jobs=[drained])
