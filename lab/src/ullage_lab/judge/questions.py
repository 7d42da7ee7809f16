"""Run every estimator on every run; answers are appended to a file, so that an interrupted ranking continues."""

import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from threading import Event, Lock
from typing import Any

import ullage
from ullage.errors import InvalidValue
from ullage.jobs.model import ROW_KEYS, rows_so_far
from ullage_lab.judge.truth import MeasuredRun, TruthSet, sample
from ullage_lab.judge.worker import Ask, Record, ask_apart

_FIELDS = {spec.name for spec in fields(Record)}


@dataclass(frozen=True)
class Question:
    estimator: str
    run: MeasuredRun
    gpu: str

    @property
    def key(self) -> str:
        """Return the key of the question, so that an answer in a file is only used for its own run."""
        row = {key: self.run.row.get(key, self.run.row.get(name)) for name, key in ROW_KEYS.items()}
        text = json.dumps([self.estimator, self.run.id, self.gpu, row], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def questions(sets: Sequence[TruthSet], counts: Mapping[str, int | None]) -> list[Question]:
    """Return all questions, run by run; `counts` gives the number of runs for each estimator (`None`: all).

    A run in several campaigns is estimated once.
    """
    by_key: dict[str, Question] = {}
    runs = {(truth.gpu, run.id): run for truth in sets for run in truth.runs}
    cards = dict.fromkeys(gpu for gpu, _ in runs)
    for gpu in cards:
        here = [run for (card, _), run in runs.items() if card == gpu]
        chosen = {name: {run.id for run in sample(here, count)} for name, count in counts.items()}
        for run in here:
            for name in counts:
                if run.id in chosen[name]:
                    question = Question(name, run, gpu)
                    by_key[question.key] = question
    return list(by_key.values())


def answers(
    wanted: Sequence[Question], ask: Ask, *, limit: float, file: Path | None = None, workers: int = 1
) -> Generator[tuple[Question, Record], None, None]:
    """Yield the answer to every question, from `file` if it is there; append new ones to it at once.

    Several workers estimate at once, which is faster, but their times are then those of a busy machine.
    """
    known = read_answers(file) if file is not None else {}
    yield from ((question, known[question.key]) for question in wanted if question.key in known)
    new = [question for question in wanted if question.key not in known]

    writing, stop = Lock(), Event()

    def answer(question: Question) -> Record:
        answer = ask_apart(ask, question.estimator, question.run.id, question.run.row, question.gpu, limit, stop)
        record = replace(answer, code=code_version())
        if file is not None and not (stop.is_set() and record.failed):
            with writing:  # not where it is yielded, so that a stopped ranking keeps running answers
                _append(file, {"key": question.key, **record.to_dict()})
        return record

    with ThreadPoolExecutor(workers) as pool:
        waiting = {pool.submit(answer, question): question for question in new}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            stop.set()
            for task in waiting:
                task.cancel()


@cache
def code_version() -> str:
    """Return a short name of this version of the code, which distinguishes its answers in a shared file."""
    packages = (Path(ullage.__file__).parent, Path(__file__).parents[1])
    sources = sorted(file for package in packages for file in package.rglob("*") if file.suffix in (".py", ".toml"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:8]


def read_answers(file: Path) -> dict[str, Record]:
    """Return the answers in a file by their keys; a last line cut off by a crash is skipped."""
    records = {}
    for row in rows_so_far(file):
        try:
            values: dict[str, Any] = {name: row[name] for name in row.keys() & _FIELDS}
            records[str(row["key"])] = Record(**values | {"notes": tuple(row.get("notes", ()))})
        except (KeyError, TypeError):
            raise InvalidValue(f"{file} must be a file that --resume wrote; it has no answers of estimators") from None
    return records


def _append(file: Path, values: dict[str, Any]) -> None:
    try:
        with file.open("a") as out:
            out.write(json.dumps(values) + "\n")
    except OSError as error:
        raise InvalidValue(f"cannot write {file}: {error.strerror}") from None
