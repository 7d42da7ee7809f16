"""The page to submit a job, which first shows where it would start and how it would affect other jobs."""

import asyncio
import secrets
import shlex
from typing import Any

from nicegui import ui

from ullage.errors import InvalidValue, NoDaemon, UllageError
from ullage.jobs.job_files import make_job
from ullage.manager.core.questions import question_of
from ullage.manager.job_words import promised_on, trial_words
from ullage.manager.page.elements import (
    box,
    button,
    card,
    describe,
    number_field,
    problem,
    set_width,
    text_field,
    words,
)
from ullage.manager.page.readings import DaemonReading
from ullage.manager.page.sessions import Session
from ullage.text import plain
from ullage.units import format_bytes

_LOOK = 0.5  # seconds between two checks of a running estimate


class JobForm:
    def __init__(self) -> None:
        with box("div", "fields"):
            self._texts = {
                "command": text_field("Command", "python train.py --lr 1e-4", "long"),
                "cwd": text_field("Folder", "/home/you/project", "long"),
                "name": text_field("Name", "as the command says"),
                "memory": text_field("GPU memory", "estimated, or 12GiB"),
                "venv": text_field("Virtual environment", "/home/you/venv"),
                "time_limit": text_field("Time limit", "none, or 12h"),
                "array": text_field("Array", "none, or 1-20"),
            }
            gpus, priority = number_field("GPUs", value=1, least=0), number_field("Priority", value=0, least=None)
            self._numbers = {"gpus": gpus, "priority": priority}
            self._switches = {"exclusive": ui.checkbox("GPUs of its own"), "hold": ui.checkbox("Hold it")}

    @property
    def job(self) -> dict[str, Any]:
        """Return the job (`JobSpec`), checked as far as possible without the daemon."""
        given: dict[str, Any] = {name: (field.value or "").strip() for name, field in self._texts.items()}
        given |= {name: int(field.value) for name, field in self._numbers.items() if field.value is not None}
        given |= {name: True for name, field in self._switches.items() if field.value}
        given = {name: value for name, value in given.items() if value != ""}
        try:
            given["command"] = shlex.split(given.get("command", ""))
        except ValueError as error:
            raise InvalidValue(f"the command cannot be read: {error}") from None
        if not given["command"]:
            raise InvalidValue("a command must be given, such as python train.py")
        if "cwd" not in given:
            raise InvalidValue("the folder in which the command runs must be given")
        return make_job(given, "the job").to_dict()


class SubmitPage:
    def __init__(self, session: Session) -> None:
        self._session, self._key, self._may = session, secrets.token_hex(16), True
        self._reading = DaemonReading()
        with box("div", "columns"):
            with box("form", "card form") as form:
                self._form = JobForm()
                with box("div", "tools"):
                    self._submit_button = button("Submit", None, "main")
                    self._try_button = button("What if?", self._try)
                self._status = words("p", "", "figures").props('role="status"')
                self._problem = problem()
            with card("What if").props('aria-live="polite"'):
                self._hint = words("p", "See where it would run now, and what it would do to other jobs.", "figures")
                self._places = box("div")
                self._answer = box("ul", "notes")
        form.on("submit.prevent", self._submit)

    async def refresh(self, reading: DaemonReading) -> None:
        """Update whether this user may submit."""
        self._reading = reading
        self._may = reading.about["scope"] in ("submit", "operate")
        for each in (self._submit_button, self._try_button):
            each.set_visibility(self._may)
        if not self._may:
            self._status.set_text("Your token allows to read; to submit a job, it needs the scope submit.")

    async def _submit(self) -> None:
        """Submit the job. Until an answer comes, repeated tries have the same key and make only one job."""
        if not self._may:
            return
        try:
            answer = await self._session.ask("submit", job=self._form.job, key=self._key)
        except NoDaemon:
            self._problem.set_text("The daemon does not answer. Submit it again when it does: it becomes one job.")
            return
        except UllageError as error:
            self._problem.set_text(plain(str(error)))
            return
        self._key = secrets.token_hex(16)
        jobs = answer["jobs"]
        ui.navigate.to(f"/job/{int(jobs[0])}" if len(jobs) == 1 else "/queue")

    async def _try(self) -> None:
        self._problem.set_text("")
        self._answer.clear()
        self._places.clear()
        try:
            job, known, lines = self._form.job, {}, []
            if "memory" not in job and job.get("gpus") != 0:
                estimate = await self._estimated(job)
                if estimate["state"] == "done":
                    known = {"estimate": estimate["id"]}
                else:
                    lines = [f"there is no estimate: {plain(str(estimate['reason']))}"]
            answer = await self._session.ask("dry_run", job=job, **known)
            lines = trial_words(answer) + lines
        except UllageError as error:
            self._problem.set_text(plain(str(error)))
            return
        finally:
            self._status.set_text("")
        with self._places:
            for start in answer["starts"][:1]:
                for gpu in self._reading.gpus:
                    if gpu["index"] in start["gpus"]:
                        by_gpu = dict(zip(start["gpus"], start["promises"], strict=False))
                        promise = by_gpu.get(gpu["index"], start["promise"])
                        _show_place(gpu, self._reading.on_gpu(gpu["id"]), promise)
        with self._answer:
            for line in lines:
                words("li", f"{line[:1].upper()}{line[1:]}.")
        self._hint.set_text("As it is now. Nothing was submitted.")

    async def _estimated(self, job: dict[str, Any]) -> dict[str, Any]:
        answer = await self._session.questions.ask(question_of(make_job(job, "the job")))
        while answer["state"] == "waiting":
            self._status.set_text(f"It {answer['reason'] or 'waits'}.")
            await asyncio.sleep(_LOOK)
            answer = await self._session.questions.look(answer["id"])
        return answer


def _show_place(gpu: dict[str, Any], jobs: list[dict[str, Any]], promise: int) -> None:
    total, before = gpu["total"] or 1, gpu["promised"] + gpu["foreign"]
    sizes = [promised_on(job, gpu["id"]) or 0 for job in jobs] + ([gpu["foreign"]] if gpu["foreign"] else [])
    with box("div", "bands") as bands:
        for size in sizes:
            set_width(box("div", "band foreign"), size / total)
        set_width(box("div", "band part job-0"), promise / total)
    now, then = format_bytes(before), format_bytes(before + promise)
    text = f"GPU {gpu['index']}: {now} of {format_bytes(gpu['total'])} are in use now, {then} with this job."
    describe(bands, text)
    words("p", text, "figures")
