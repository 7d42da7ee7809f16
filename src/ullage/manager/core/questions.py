"""Estimates that users request without a job: made like all others, answered in full, and stored."""

import os
import secrets
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ullage.errors import InvalidValue, NotAllowed, UnknownName
from ullage.estimation.estimators.registry import check_name
from ullage.estimation.result import Estimate
from ullage.hardware import gpu as find_gpu
from ullage.jobs.estimate_spec import SCRIPT, EstimateSpec
from ullage.jobs.job_files import JobSpec
from ullage.manager.core.context import ManagerContext
from ullage.manager.core.estimates import EstimateAnswer, EstimateQuestion, EstimateRequest, key_of, questions_of
from ullage.manager.core.intake import NOBODY, Intake
from ullage.manager.core.works import read_utilization
from ullage.manager.identity import Caller, rights
from ullage.manager.running.environment import estimate_environment
from ullage.manager.storage.database import Database
from ullage.manager.storage.records import packed, unpacked
from ullage.text import plain

MOST_OPEN, MOST_KEPT = 20, 10_000  # stored questions per user
_OF_OTHERS = ("script", "args", "command", "env", "cwd", "venv", "conda")  # shown only to the user who asked


@dataclass(frozen=True, kw_only=True)
class QuestionRecord:
    """A question and its answer, once known. Times are in seconds since 1970."""

    id: str
    uid: int
    gid: int
    user: str
    asked: float
    question: dict[str, Any] = field(repr=False)
    answered: float | None = None
    answer: dict[str, Any] | None = field(default=None, repr=False)


class Questions:
    """Answers estimates without a job, in the same queue as estimates of jobs. Questions are stored under an id that
    cannot be guessed; unanswered ones are in memory too."""

    def __init__(self, context: ManagerContext, intake: Intake, database: Database) -> None:
        self._context, self._intake, self._estimates = context, intake, intake.estimates
        self._database, self._store = database, context.store
        self._open = {each.id: each for each in self._stored("answered IS NULL ORDER BY asked")}
        intake.answer_question = self._answered

    def _stored(self, where: str, *values: Any) -> list[QuestionRecord]:
        """Return the questions that match a condition in SQL. Thread-safe."""
        records = []
        for row in map(dict, self._database.rows(f"SELECT * FROM questions WHERE {where}", values)):
            answer = None if row["answer"] is None else unpacked(row["answer"])
            records.append(QuestionRecord(**{**row, "question": unpacked(row["question"]), "answer": answer}))
        return records

    def _record(self, id: str) -> QuestionRecord:
        record = self._open.get(id) or next(iter(self._stored("id = ?", id)), None)
        if record is None:
            raise UnknownName("estimate", id[:80], [])
        return record

    def ask(self, caller: Caller, spec: EstimateSpec) -> dict[str, Any]:
        """Add a question; if the user has too many, remove the oldest."""
        if sum(each.uid == caller.uid for each in self._open.values()) >= MOST_OPEN:
            raise InvalidValue(f"you have {MOST_OPEN} questions without an answer; ask again when one is answered")
        if spec.estimator is not None:
            check_name(spec.estimator)
        gpus = known_gpus(spec) or sorted({device.name for device in self._context.slot_reader.devices()})
        if not questions_about(spec):
            raise InvalidValue("the command must run a script or a module with Python, but it runs none")
        question = {**spec.to_dict(), "gpu": gpus}
        id, now, who = secrets.token_hex(16), self._context.clock(), (caller.uid, caller.gid, caller.user)
        record = QuestionRecord(id=id, uid=who[0], gid=who[1], user=who[2], asked=now, question=question)
        self._store.also(
            "INSERT INTO questions (id, uid, gid, user, asked, question) VALUES (?, ?, ?, ?, ?, ?)",
            (id, *who, now, packed(question)),
        )
        self._store.also(
            "DELETE FROM questions WHERE uid = ? AND answered IS NOT NULL AND id NOT IN "
            "(SELECT id FROM questions WHERE uid = ? ORDER BY asked DESC LIMIT ?)",
            (caller.uid, caller.uid, MOST_KEPT),
        )
        self._store.afterwards(partial(self._want, record))
        return self._shown(caller, record)

    def one(self, caller: Caller, id: str) -> dict[str, Any]:
        """Return a question. Anyone with its id sees the answer; only its user sees script and paths."""
        return self._shown(caller, self._record(id))

    def asked_by(self, caller: Caller, limit: int) -> list[dict[str, Any]]:
        shown = [
            self._shown(caller, each) for each in self._stored("uid = ? ORDER BY asked DESC LIMIT ?", caller.uid, limit)
        ]
        for each in shown:
            each["question"].pop("script", None)
            del each["estimates"], each["advice"]
        return shown

    def is_open(self, id: str) -> bool:
        return id in self._open

    def cancel(self, caller: Caller, id: str) -> dict[str, Any]:
        record = self._record(id)
        if not caller.may_change(record.uid):
            raise NotAllowed(f"{caller.user} may not cancel what {record.user} asked")
        if self.is_open(id):
            self._answer(id, {"estimates": [], "reason": "it was cancelled"})
            self._store.afterwards(partial(self._estimates.give_up, [id]))
        return {"id": id}

    def expected(self, caller: Caller, id: str) -> tuple[int, dict[str, dict[str, Any]], str]:
        record = self._record(id)
        if not caller.may_change(record.uid):
            raise NotAllowed(f"{caller.user} may not use what {record.user} asked")
        estimates = (record.answer or {}).get("estimates", [])
        try:
            made = [Estimate.from_dict(each) for each in estimates]
            worst = max(made, key=lambda each: each.bound)
            note = f"estimated by {worst.estimator} for {worst.gpu}"
            known = {each.gpu: each.utilization.to_dict() for each in made if each.utilization is not None}
            bound = min(worst.bound, worst.gpu_memory) if worst.fits else worst.bound
            return int(bound), read_utilization(known, list(known)), plain(note)
        except (InvalidValue, TypeError, ValueError):
            raise InvalidValue(f"the estimate must have an answer, but {id[:80]} has none") from None

    def resume(self) -> None:
        """After a restart, request the estimates of unanswered questions again."""
        for record in list(self._open.values()):
            self._want(record)

    def _want(self, record: QuestionRecord) -> None:
        self._open[record.id] = record
        spec = EstimateSpec.model_validate(record.question)
        request = request_of(spec, record.uid, record.gid, self._context.settings.estimating.estimator)
        self._intake.ask(record.id, request)

    def _answered(self, id: str, answer: EstimateAnswer) -> None:
        if id in self._open:
            self._answer(id, answer.shown(self._open[id].question))

    def _answer(self, id: str, answer: dict[str, Any]) -> None:
        """Store the answer, and drop the question's variables, which may be secret."""
        record = self._open.get(id)
        if record is not None:
            question = {name: value for name, value in record.question.items() if name != "env"}
            self._store.also(
                "UPDATE questions SET question = ?, answered = ?, answer = ? WHERE id = ?",
                (packed(question), self._context.clock(), packed(answer), id),
            )
            self._store.afterwards(partial(self._open.pop, id, None))

    def _shown(self, caller: Caller, record: QuestionRecord) -> dict[str, Any]:
        mine, answer = caller.may_change(record.uid), record.answer or {}
        question = {name: value for name, value in record.question.items() if mine or name not in _OF_OTHERS}
        question.pop("env", None)
        state = "waiting" if record.answer is None else "done" if answer["estimates"] else "failed"
        reason = answer.get("reason")
        if state == "waiting":
            reason = self._estimates.standing(record.id)
        elif state == "failed" and not mine:
            reason = f"why is told to {record.user} alone"  # it may quote the script
        return {
            "id": record.id,
            "state": state,
            "user": record.user,
            "asked": record.asked,
            "answered": record.answered,
            "question": question,
            "reason": reason,
            "estimates": answer.get("estimates", []),
            "advice": answer.get("advice"),
        }


def questions_about(spec: EstimateSpec) -> list[EstimateQuestion]:
    """Return the estimates that answer a question; none for a command without Python."""
    if spec.model is not None:
        return [EstimateQuestion(spec.model, options=spec.options)]
    if spec.script is not None:
        program = "python" if spec.names_a_python else None
        return [EstimateQuestion(SCRIPT, tuple(spec.args), options=spec.options, program=program, text=spec.script)]
    return [replace(each, options={**each.options, **spec.options}) for each in questions_of(spec.job)]


def question_of(spec: JobSpec) -> dict[str, Any]:
    """Return the question whose answer is the estimate of a job."""
    names = {"model" if spec.model is not None else "command", "cwd", "env", "venv", "conda", "estimator"}
    options = next((each.options for each in questions_of(spec)), {})
    return {**spec.model_dump(include=names, exclude_none=True), "options": options, "details": False}


def request_of(spec: EstimateSpec, uid: int, gid: int, estimator: str = NOBODY) -> EstimateRequest:
    estimator, job, questions = spec.estimator or estimator, spec.job, questions_about(spec)
    estimator = "ullage" if estimator == NOBODY else estimator
    return EstimateRequest(
        key=key_of(job, uid, estimator, spec.gpus, questions, spec.advice),
        uid=uid,
        estimator=estimator,
        questions=questions,
        gpus=spec.gpus,
        env=estimate_environment(job, uid, job.title),
        cwd=job.folder,
        conda=spec.conda,
        rights=rights(uid, gid),
        advice=spec.advice,
    )


def known_gpus(spec: EstimateSpec) -> list[str]:
    return list(dict.fromkeys(map(_known, spec.gpus)))


def _known(name: str) -> str:
    """Return a GPU's name. The daemon opens no path that a user names."""
    if os.sep in name or name.strip().endswith(".toml"):
        raise InvalidValue(f"the GPU must be given by name ('ullage gpus' lists them), got the path {name[:80]!r}")
    return find_gpu(name).name
