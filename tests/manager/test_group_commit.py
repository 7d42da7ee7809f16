"""Submissions that share a transaction: each is answered for itself, and only when it is on disk."""

import asyncio
from functools import partial

from ullage.errors import DiskFull, InvalidValue
from ullage.manager.storage.group_commit import GroupCommit
from ullage.manager.storage.records import State


def row(name):
    return {
        "user": "ada",
        "uid": 1,
        "gid": 1,
        "name": name,
        "state": State.QUEUED,
        "submitted": 0.0,
        "priority": 0,
        "spec": {},
        "submission": f"key of {name}",
        "exclusive": False,
    }


def at_once(store, *works):
    async def all_of_them():
        together = GroupCommit(store)
        return await asyncio.gather(*(together.do(work) for work in works), return_exceptions=True)

    return asyncio.run(all_of_them())


def submit(store, name):
    known = store.of_submission(f"key of {name}")
    made = known or (yield from store.submit(row(name), [({"part": 0, "array_index": None}, ())]))
    return made[0].id


def refuse():
    raise InvalidValue("no")


def names(store):
    return [each["name"] for each in store.database.rows("SELECT name FROM jobs ORDER BY id")]


def test_simultaneous_submissions_are_one_commit(store):
    told = []
    store.database.commits = 0
    works = [partial(submit, store, name) for name in "abcdefgh"]
    assert at_once(store, *works, lambda: store.afterwards(lambda: told.append(store.database.commits))) == [
        *range(1, 9),
        None,
    ]
    assert store.database.commits == 1 and told == [1], "what comes after it comes after the commit"
    assert sorted(store.jobs) == list(range(1, 9)) and store.changed() == set(range(1, 9))


def test_the_same_key_twice_at_once_is_one_job(store):
    assert at_once(store, partial(submit, store, "a"), partial(submit, store, "a")) == [1, 1]
    assert names(store) == ["a"]


def test_one_that_is_refused_does_not_hinder_the_others(store):
    first, refused, last = at_once(store, partial(submit, store, "a"), refuse, partial(submit, store, "b"))
    assert (first, last) == (1, 2) and isinstance(refused, InvalidValue)


def test_a_failure_after_a_write_is_rolled_back_alone(store):
    def broken():
        yield from submit(store, "half")
        raise ZeroDivisionError

    answers = at_once(store, partial(submit, store, "a"), broken, partial(submit, store, "b"))
    assert isinstance(answers[1], ZeroDivisionError) and names(store) == ["a", "b"]
    assert sorted(store.jobs) == [answers[0], answers[2]]


def test_a_full_disk_acknowledges_no_order(store):
    store.database.execute(f"PRAGMA max_page_count = {store.database.rows('PRAGMA page_count')[0][0]}")
    answers = at_once(store, partial(submit, store, "a"), partial(submit, store, "x" * 100_000))
    assert [type(answer) for answer in answers] == [DiskFull, DiskFull] and names(store) == [] and not store.jobs


def test_submissions_in_progress_count_for_simultaneous_ones(store):
    """Or many at once could go beyond any limit."""

    def counted(name):
        before = store.number_of(1), store.number_of(2), store.number_of(), store.bytes_of(1) > 0
        yield from submit(store, name)
        return before

    found = at_once(store, partial(counted, "a"), partial(counted, "b"), partial(counted, "c"))
    assert found == [(0, 0, 0, False), (1, 0, 1, True), (2, 0, 2, True)]
    assert (store.number_of(1), store.number_of()) == (3, 3)
