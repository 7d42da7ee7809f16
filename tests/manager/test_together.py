"""Submissions that share a transaction: each is answered for itself, and only when it is on disk."""

import asyncio
from functools import partial

import pytest

from ullage.errors import InvalidValue, StoreFull
from ullage.manager.storage.book import Book, Together
from ullage.manager.storage.records import State
from ullage.manager.storage.store import Store


class Counting(Store):
    """Counts what reaches the disk."""

    commits = 0

    def _committed(self, statement):
        self.commits += statement == "COMMIT"

    def __init__(self, folder):
        super().__init__(folder)
        self._connection.set_trace_callback(self._committed)


@pytest.fixture
def book(tmp_path):
    store = Counting(tmp_path)
    made = Book(store, clock=lambda: 0.0)
    made.store = store
    yield made
    store.close()


def row(name):
    return {
        "user": "ada", "uid": 1, "gid": 1, "name": name, "state": State.QUEUED, "submitted": 0.0, "priority": 0,
        "spec": {}, "submission": f"key of {name}", "part": 0, "exclusive": False, "array_index": None,
        "estimate_key": None, "estimate_note": None, "need": None,
    }  # fmt: skip


def at_once(book, *works):
    async def all_of_them():
        together = Together(book)
        return await asyncio.gather(*(together.do(work) for work in works), return_exceptions=True)

    return asyncio.run(all_of_them())


def submit(book, name):
    return book.submit([row(name)], {})[0].id


def refuse():
    raise InvalidValue("no")


def names(book):
    return [each["name"] for each in book.store.rows("SELECT name FROM jobs ORDER BY id")]


def test_those_that_come_at_once_are_one_commit(book):
    told = []
    book.store.commits = 0
    works = [partial(submit, book, name) for name in "abcdefgh"]
    assert at_once(book, *works, lambda: book.afterwards(lambda: told.append(book.store.commits))) == [
        *range(1, 9),
        None,
    ]
    assert book.store.commits == 1 and told == [1], "what comes after it comes after the commit"
    assert sorted(book.jobs) == list(range(1, 9)) and book.changed() == set(range(1, 9))


def test_the_same_key_twice_at_once_is_one_job(book):
    assert at_once(book, partial(submit, book, "a"), partial(submit, book, "a")) == [1, 1]
    assert names(book) == ["a"]


def test_one_that_is_refused_does_not_hinder_the_others(book):
    first, refused, last = at_once(book, partial(submit, book, "a"), refuse, partial(submit, book, "b"))
    assert (first, last) == (1, 2) and isinstance(refused, InvalidValue)


def test_one_that_breaks_after_it_has_written_leaves_nothing_and_spoils_nothing(book):
    def broken():
        submit(book, "half")
        raise ZeroDivisionError

    answers = at_once(book, partial(submit, book, "a"), broken, partial(submit, book, "b"))
    assert isinstance(answers[1], ZeroDivisionError) and names(book) == ["a", "b"]
    assert sorted(book.jobs) == [answers[0], answers[2]]


def test_on_a_full_disk_nobody_is_told_that_it_was_done(book):
    book.store.execute(f"PRAGMA max_page_count = {book.store.rows('PRAGMA page_count')[0][0]}")
    answers = at_once(book, partial(submit, book, "a"), partial(submit, book, "x" * 100_000))
    assert [type(answer) for answer in answers] == [StoreFull, StoreFull] and names(book) == [] and not book.jobs
