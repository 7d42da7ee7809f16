"""Questions that users asked without a job, and the answers: kept under an id that nobody can guess."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ullage.errors import UnknownName
from ullage.manager.storage.database import Database
from ullage.manager.storage.job_store import JobStore

MOST_KEPT = 10_000  # of one user
_COLUMNS = "id, uid, gid, user, asked, question, answered, answer"


@dataclass(frozen=True, kw_only=True)
class QuestionRecord:
    """A question and, once it is known, the answer; times in seconds since 1970."""

    id: str
    uid: int
    gid: int
    user: str
    asked: float
    question: dict[str, Any] = field(repr=False)
    answered: float | None = None
    answer: dict[str, Any] | None = field(default=None, repr=False)


class QuestionStore:
    """Keeps questions, within transactions of the job store. Those without an answer are in memory too."""

    def __init__(self, database: Database, store: JobStore, clock: Callable[[], float]) -> None:
        self._database, self._store, self._clock = database, store, clock
        rows = database.rows(f"SELECT {_COLUMNS} FROM questions WHERE answered IS NULL ORDER BY asked")
        self.open = {row["id"]: _record(row) for row in rows}

    def ask(self, record: QuestionRecord) -> None:
        """Keep a new question. Of one user the oldest goes where there are too many."""
        values = (record.id, record.uid, record.gid, record.user, record.asked, _packed(record.question), None, None)
        self._store.also(f"INSERT INTO questions ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        self._store.also(
            "DELETE FROM questions WHERE uid = ? AND answered IS NOT NULL AND id NOT IN "
            "(SELECT id FROM questions WHERE uid = ? ORDER BY asked DESC LIMIT ?)",
            (record.uid, record.uid, MOST_KEPT),
        )
        self._store.afterwards(partial(self._take, record))

    def answer(self, id: str, answer: dict[str, Any]) -> None:
        """Keep the answer. The variables that came with the question may be secret, and are dropped."""
        record = self.open.get(id)
        if record is None:
            return
        question = {name: value for name, value in record.question.items() if name != "env"}
        done = replace(record, question=question, answered=self._clock(), answer=answer)
        self._store.also(
            "UPDATE questions SET question = ?, answered = ?, answer = ? WHERE id = ?",
            (_packed(question), done.answered, _packed(answer), id),
        )
        self._store.afterwards(partial(self._take, done))

    def _take(self, record: QuestionRecord) -> None:
        if record.answer is None:
            self.open[record.id] = record
        else:
            self.open.pop(record.id, None)

    def of_user(self, uid: int, limit: int) -> list[QuestionRecord]:
        """The questions of a user, the newest first. Any thread may ask."""
        asked = f"SELECT {_COLUMNS} FROM questions WHERE uid = ? ORDER BY asked DESC LIMIT ?"
        return [_record(row) for row in self._database.rows(asked, (uid, limit))]

    def one(self, id: str) -> QuestionRecord:
        """The question of that id. Any thread may ask."""
        found = self.open.get(id)
        rows = [] if found else self._database.rows(f"SELECT {_COLUMNS} FROM questions WHERE id = ?", (id,))
        if found is None and not rows:
            raise UnknownName("estimate", id[:80], [])
        return found or _record(rows[0])


def _packed(value: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps(value).encode())


def _record(row: Any) -> QuestionRecord:
    values = dict(row)
    for name in ("question", "answer"):
        values[name] = None if values[name] is None else json.loads(zlib.decompress(values[name]))
    return QuestionRecord(**values)
