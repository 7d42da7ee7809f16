"""The page of one job: what it runs, what it was promised and takes, its attempts, its output, and what can be done."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import ui

from ullage.errors import UllageError
from ullage.job_words import label, memory, why
from ullage.page.elements import Curve, box, set_width, words
from ullage.page.frame import Frame
from ullage.page.readings import DaemonReading
from ullage.page.sessions import Session
from ullage.text import plain
from ullage.units import format_duration

_SHOWN = 32 << 10  # characters of the output
_STREAMS = {"output": "stdout", "errors": "stderr"}
# By order: in which states it makes sense, and what to ask before; "" asks nothing.
_ORDERS = {
    "cancel": (("estimating", "queued", "held", "starting", "running"), "Cancel this job? If it runs, it is stopped."),
    "hold": (("estimating", "queued"), ""),
    "release": (("held",), ""),
    "requeue": (("running", "done", "failed", "cancelled"), "Put this job into the queue again, from its beginning?"),
}


def show_job(session: Session, number: int) -> None:
    """Build the page."""
    frame = Frame(session, f"Job {number}", "")
    with frame.main:
        problem = words("p", "", "problem").props('role="alert"')
        with box("div", "columns") as sheet:
            view = JobSheet(session, number)
    sheet.set_visibility(False)

    async def refresh(reading: DaemonReading) -> None:
        if reading.trouble:
            return
        try:
            job = await session.readings.job(number)
        except UllageError as error:
            problem.set_text(plain(str(error)))
            return
        problem.set_text("")
        sheet.set_visibility(True)
        await view.show(job, reading)

    frame.every_reading(refresh)


class JobSheet:
    """The parts of the page."""

    def __init__(self, session: Session, number: int) -> None:
        self._session, self._number = session, number
        self._stream, self._tail = "stdout", LogTail(session.ask, number, "stdout")
        self._facts: dict[str, Any] = {}
        self._attempts: list[dict[str, Any]] = []
        with box("div"):
            with box("section", "card"):
                self._name = words("h2")
                self._list = box("dl", "facts")
                with box("div", "tools"):
                    self._buttons = {order: self._button(order) for order in _ORDERS}
                self._done = words("p", "", "figures").props('role="status"')
            with box("section", "card"):
                words("h2", "Memory")
                with box("div", "bands"), box("div", "band job-0 whole"):
                    self._used = box("div", "used")
                self._memory = words("p", "", "figures")
                self._curve = Curve("used")
            with box("section", "card"):
                words("h2", "Attempts")
                self._table = box("ol", "attempts")
        with box("section", "card log"):
            with box("div", "head"):
                words("h2", "Output")
                chosen = ui.toggle(list(_STREAMS), value="output").props('no-caps unelevated aria-label="Which output"')
            self._where = words("p", "", "figures")
            self._text = words("pre").props('tabindex="0" aria-label="Output of the job"')

        def choose() -> None:
            self._tail = LogTail(session.ask, number, _STREAMS[str(chosen.value)])
            self._text.set_text("")

        chosen.on_value_change(choose)

    async def show(self, job: dict[str, Any], reading: DaemonReading) -> None:
        """What the job is now."""
        self._name.set_text(f"{job['name']}: {job['state']}")
        index = {gpu["id"]: gpu["index"] for gpu in reading.gpus}
        places = [index.get(place, place) for place in job["gpus_used"]]
        self._show_facts(_facts(job | {"places": places}))
        may = "command" in job and reading.about["scope"] in ("submit", "operate")
        for order, button in self._buttons.items():
            button.set_visibility(may and job["state"] in _ORDERS[order][0])
        self._show_memory(job)
        if job["attempts"] != self._attempts:
            self._attempts = job["attempts"]
            self._table.clear()
            with self._table:
                for attempt in job["attempts"]:
                    words("li", _attempt(attempt, index))
        try:
            changed = await self._tail.more()
        except UllageError as error:
            self._where.set_text(plain(str(error)))
            return
        self._where.set_text(self._tail.note)
        if changed:
            self._text.set_text(self._tail.text)

    def _show_facts(self, facts: dict[str, str]) -> None:
        if list(facts) != list(self._facts):
            self._list.clear()
            with self._list:
                self._facts = {name: (words("dt", name), words("dd"))[1] for name in facts}
        for name, text in facts.items():
            self._facts[name].set_text(text)

    def _show_memory(self, job: dict[str, Any]) -> None:
        series = self._session.readings.series("job", str(self._number))
        used = job["used"]
        most = max((one["used"] or 0 for one in job["attempts"]), default=0)
        most = max([most, *(int(value) for _, value in series if value is not None)])
        top = max(filter(None, (job["promise"], used, most)), default=0)
        set_width(self._used, (used or 0) / top if top else 0.0)
        over = " It takes more than it was promised." if job["over_promise"] else ""
        figures = [] if used is None else [f"{memory(used)} used now"]
        figures += [f"{memory(most)} at most"] if most else []
        self._memory.set_text(f"{', '.join([*figures, memory(job['promise']) + ' promised'])}.{over}")
        self._curve.row.set_visibility(bool(series))
        self._curve.show(series, float(top), memory(used))

    def _button(self, order: str) -> Any:
        return words("button", order.capitalize(), f"quiet {order}").props('type="button"').on(
            "click", lambda: self._asked(order)
        )  # fmt: skip

    async def _asked(self, order: str) -> None:
        question = _ORDERS[order][1]
        if question and not await _confirmed(question, order):
            return
        more: dict[str, Any] = {"hold": False, "env": None} if order == "requeue" else {}
        try:
            answers = await self._session.ask(order, jobs=[self._number], **more)
        except UllageError as error:
            self._done.set_text(plain(str(error)))
        else:
            self._done.set_text("; ".join(f"job {one['job']} {one['text']}" for one in answers))
            self._session.readings.forget(self._number)


async def _confirmed(question: str, order: str) -> bool:
    with ui.dialog() as dialog, box("div", "card question"):
        words("p", question)
        with box("div", "tools"):
            words("button", order.capitalize(), "quiet").props('type="button"').on("click", lambda: dialog.submit(True))
            words("button", "Leave it", "quiet").props('type="button" autofocus').on("click", dialog.close)
    answer = await dialog
    dialog.delete()
    return bool(answer)


def _facts(job: dict[str, Any]) -> dict[str, str]:
    facts = {"Job": label(job), "User": f"{job['user']}, priority {job['priority']}"}
    if job.get("command"):
        facts |= {"Command": shlex.join(job["command"]), "Folder": job["cwd"]}
    number = f"{job['gpus']} GPU{'' if job['gpus'] == 1 else 's'}" + (", alone" if job["exclusive"] else "")
    facts["Promise"] = f"{memory(job['promise'])} on {number}" if job["gpus"] else "no GPU"
    facts["Estimate"] = job["estimate"] or "under way"
    ending = "Ended" if job["ended"] is not None else "Runs" if job["alone"] is not None else "Waits"
    facts[ending] = why(job)
    spans = [f"waited {format_duration(job['waited'])}", f"ran {format_duration(job['ran'])}"]
    facts["Time"] = f"submitted {_moment(job['submitted'])}; {', '.join(spans)}"
    return facts


def _attempt(attempt: dict[str, Any], index: dict[str, int]) -> str:
    where = ", ".join(f"GPU {index.get(slot, slot)}" for slot in attempt["slots"]) or "no GPU"
    ended = attempt["cause"] or attempt["state"]
    code = "" if attempt["exit_code"] in (None, 0) else f", exit code {attempt['exit_code']}"
    detail = f" ({attempt['detail']})" if attempt["detail"] and attempt["detail"] != attempt["cause"] else ""
    used = "" if attempt["used"] is None else f", used {memory(attempt['used'])} at most"
    return f"{where}, {memory(attempt['promise'])} promised{used}: {ended}{code}{detail}"


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


class LogTail:
    """The end of a job's output, as it grows."""

    def __init__(self, ask: Callable[..., Awaitable[Any]], job: int, stream: str) -> None:
        self._ask, self._job, self._stream = ask, job, stream
        self._attempt: int | None = None
        self._offset: int | None = None  # unknown: begin with the end
        self._raw = ""
        self.note = ""

    @property
    def text(self) -> str:
        """What is to be shown: of a line that was written over, the last state; no characters that control anything."""
        return "\n".join(plain(line.rstrip("\r").rpartition("\r")[2]) for line in self._raw.split("\n"))

    async def more(self) -> bool:
        """Ask for what came since; whether there was something."""
        where = {"tail": _SHOWN} if self._offset is None else {"offset": self._offset}
        piece = await self._ask("logs", job=self._job, stream=self._stream, **where)
        if self._offset is not None and piece["attempt"] != self._attempt:
            self._raw, self._offset = "", None  # a new attempt begins a new file
            return await self.more()
        cut = self._offset is None and len(piece["text"]) >= _SHOWN // 2 and piece["offset"] > _SHOWN
        self._attempt, self._offset = piece["attempt"], piece["offset"]
        whole = self._raw + (piece["text"].partition("\n")[2] if cut else piece["text"])
        changed, self._raw = bool(piece["text"]), whole[-_SHOWN:]
        number = "" if self._attempt is None else f"of attempt {self._attempt}"
        file = f", which also writes to {plain(piece['file'])}" if piece["file"] else ""
        self.note = f"The end of the output {number}{file}" if number else "It has not started yet."
        return changed
