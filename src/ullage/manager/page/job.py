"""The page of one job: its command, promise, memory use, attempts and output, and the orders for it."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import ui

from ullage.errors import UllageError
from ullage.estimation.words import BREAKDOWN_WORDS
from ullage.manager.job_words import attempt_words, exact_moment, facts, memory, reference, why
from ullage.manager.page.answer import show_bands, show_parts
from ullage.manager.page.charts import memory_figure, memory_line, on_axis, use_charts
from ullage.manager.page.elements import box, button, card, describe, problem, set_width, show_facts, toggle, words
from ullage.manager.page.frame import Frame
from ullage.manager.page.readings import DaemonReading
from ullage.manager.page.sessions import Session
from ullage.text import plain
from ullage.units import GIB, format_bytes, parse_bytes

_SHOWN = 32 << 10  # characters of output to show
_EVERY = 5.0  # seconds between two requests for the memory over time
_STREAMS = {"output": "stdout", "errors": "stderr"}
# By order: the states in which it makes sense, and the question before it; "" asks nothing.
_ORDERS = {
    "cancel": (("queued", "held", "starting", "running"), "Cancel this job? If it runs, it is stopped."),
    "hold": (("queued",), ""),
    "release": (("held",), ""),
    "requeue": (("running", "done", "failed", "cancelled"), "Put this job into the queue again, from its beginning?"),
}
_NO_VARIABLES = "Its environment variables were not kept after its end, so it runs without them."


def show_job(session: Session, number: int) -> None:
    frame = Frame(session, f"Job {number}")
    use_charts()
    with frame.main:
        trouble = problem()
        with box("div", "columns") as sheet:
            view = JobSheet(session, number)
    sheet.set_visibility(False)

    async def refresh(reading: DaemonReading) -> None:
        if reading.trouble:
            return
        try:
            job = await session.readings.job(number)
        except UllageError as error:
            trouble.set_text(plain(str(error)))
            return
        trouble.set_text("")
        frame.call(f"Job {reference(job)}")
        sheet.set_visibility(True)
        await view.show(job, reading)

    frame.every_reading(refresh)


class JobSheet:
    def __init__(self, session: Session, number: int) -> None:
        self._session, self._number = session, number
        self._stream, self._tail = "stdout", LogTail(session.ask, number, "stdout")
        self._facts: dict[str, Any] = {}
        self._job: dict[str, Any] = {}
        self._next_curve = 0.0
        self._parts: dict[str, int] | None = None
        self._attempts: list[dict[str, Any]] = []
        with box("div"):
            with card():
                self._name = words("h2")
                self._list = box("dl", "facts")
                with box("div", "tools"):
                    self._buttons = {order: self._button(order) for order in _ORDERS}
                    self._more = button("Rerun with more memory", self._ask_for_more)
            with card("Memory"):
                with box("div", "bands"), box("div", "band job-0 whole"):
                    self._used, self._beyond = box("div", "used"), box("div", "beyond")
                self._memory = words("p", "", "figures")
                lines = [
                    memory_line("used", [], {":color": "ullage.tints[0]"}, area=True),
                    memory_line("promised", [], {":color": "ullage.css('--warn')"}, lineStyle={"type": "dashed"}),
                ]
                self._chart = ui.echart(memory_figure({"type": "time"}, lines)).classes("over-time")
                self._chart.set_visibility(False)
            self._estimate = card(kind="answer")
            with card("Attempts"):
                self._none = words("p", "None yet: it has not started.", "figures")
                self._table = box("ol", "attempts")
        with card(kind="log"):
            with box("div", "head"):
                words("h2", "Output")
                chosen = toggle("Which output", _STREAMS, "output")
            self._where = words("p", "", "figures")
            self._out = box("div", "tail")
            self._out.props('tabindex="0" role="log" aria-live="off" aria-label="Output of the job"')
            with self._out:
                self._text = words("pre")

        def choose() -> None:
            self._tail = LogTail(session.ask, number, _STREAMS[str(chosen.value)])
            self._text.set_text("")

        chosen.on_value_change(choose)

    async def show(self, job: dict[str, Any], reading: DaemonReading) -> None:
        self._job = job
        self._name.set_text(f"{job['name']}: {job['state']}")
        places = [reading.places.get(place, place) for place in job["gpus_used"]]
        self._show_facts(_facts(job | {"places": places}))
        may = "command" in job and reading.about["scope"] in ("submit", "operate")
        for order, pressed in self._buttons.items():
            pressed.set_visibility(may and job["state"] in _ORDERS[order][0])
        self._more.set_visibility(may and job["more_memory"] is not None)
        self._show_memory(job)
        self._show_estimate(job)
        await self._show_over_time()
        self._none.set_visibility(not job["attempts"])
        if job["attempts"] != self._attempts:
            self._attempts = job["attempts"]
            self._table.clear()
            with self._table:
                for attempt in job["attempts"]:
                    words("li", _attempt(attempt, reading.places))
        try:
            changed = await self._tail.more()
        except UllageError as error:
            self._where.set_text(plain(str(error)))
            return
        self._where.set_text(self._tail.note)
        if changed:
            self._text.set_text(self._tail.text)
        self._out.set_visibility(bool(self._text.text))

    def _show_facts(self, facts: dict[str, str]) -> None:
        if list(facts) != list(self._facts):
            self._list.clear()
            with self._list:
                self._facts = show_facts(facts.items())
        for name, text in facts.items():
            self._facts[name].set_text(text)

    def _show_memory(self, job: dict[str, Any]) -> None:
        used = job["used"]
        most = max([used or 0, *(one["used"] or 0 for one in job["attempts"])])
        top = max(filter(None, (job["promise"], used, most)), default=0)
        set_width(self._used, (used or 0) / top if top else 0.0)
        beyond = (used or 0) - (job["promise"] or 0) if job["over_promise"] else 0
        set_width(self._beyond, beyond / top if top else 0.0)
        over = " It takes more than it was promised." if job["over_promise"] else ""
        self._memory.classes(replace="figures over" if over else "figures")
        figures = [] if used is None else [f"{memory(used)} used now"]
        figures += [f"{memory(most)} at most"] if most else []
        self._memory.set_text(f"{', '.join([*figures, memory(job['promise']) + ' promised'])}.{over}")

    def _show_estimate(self, job: dict[str, Any]) -> None:
        parts: dict[str, int] = job.get("breakdown") or {}
        self._estimate.set_visibility(bool(parts))
        if parts == self._parts:
            return
        self._parts = parts
        self._estimate.clear()
        total = sum(parts.values())
        with self._estimate:
            words("h2", "Estimate")
            words("p", job["estimate"] or "", "figures")
            show_bands(parts, max(total, 1), total)
            show_parts(parts, BREAKDOWN_WORDS.__getitem__)
            safe = f"{format_bytes(total)} in all, at the peak. The promise has something on top, to be safe."
            words("p", safe, "figures")

    async def _show_over_time(self) -> None:
        if time.monotonic() < self._next_curve:
            return
        self._next_curve = time.monotonic() + _EVERY
        try:
            attempts = (await self._session.ask("memory", job=self._number))["attempts"]
        except UllageError:
            return  # the next reading reports the problem
        used, promised = _lines(attempts)
        self._chart.set_visibility(bool(used))
        if used:
            most = max(value for _, value in used if value is not None)
            describe(self._chart, f"Memory over time: {most:.1f} GiB at most")
            self._chart.run_chart_method("setOption", {"series": [{"data": used}, {"data": promised}]})
            self._chart.run_chart_method("resize")

    def _button(self, order: str) -> Any:
        return button(order.capitalize(), lambda: self._give(order), f"quiet {order}")

    async def _give(self, order: str) -> None:
        question = _ORDERS[order][1] + (self._without_variables if order == "requeue" else "")
        if question and await _confirmed(question, order.capitalize()) is None:
            return
        more: dict[str, Any] = {"hold": False, "env": None} if order == "requeue" else {}
        await self._order(order, **more)

    async def _ask_for_more(self) -> None:
        """Requeue the job with more memory: the daemon's proposal, or a size that the user types."""
        question = f"Put this job into the queue again, with more memory?{self._without_variables}"
        typed = await _confirmed(question, "Rerun", format_bytes(self._job["more_memory"] or 0))
        if typed is not None:
            try:
                wanted = parse_bytes(typed)
            except UllageError as error:
                ui.notify(plain(str(error)), type="negative")
                return
            await self._order("requeue", hold=False, env=None, memory=wanted)

    async def _order(self, order: str, **more: Any) -> None:
        try:
            answers = await self._session.ask(order, jobs=[self._number], **more)
        except UllageError as error:
            ui.notify(plain(str(error)), type="negative", timeout=10_000)
            return
        for one in answers:
            kind: Any = "positive" if one["done"] else "negative"
            ui.notify(f"job {one['reference']} {one['text']}", type=kind, timeout=10_000)
        self._session.readings.forget(self._number)

    @property
    def _without_variables(self) -> str:
        over = self._job.get("ended") is not None
        return f" {_NO_VARIABLES}" if over and self._job.get("env") else ""


async def _confirmed(question: str, order: str, memory: str | None = None) -> str | None:
    """Ask for confirmation of an order, and perhaps for memory. Return the typed text or the order; `None` if the user
    cancels."""
    dialog = ui.dialog()
    dialog.on("hide", dialog.delete)  # returns the keyboard focus to where it was
    with dialog, box("div", "card question"):
        words("p", question)
        if memory is not None:
            size = ui.input("GPU memory on each GPU", value=memory).props("outlined dense autofocus")
        with box("div", "tools"):
            button(order, lambda: dialog.submit(order if memory is None else str(size.value)))
            button("Leave it", dialog.close).props("" if memory else "autofocus")
    answer: str | None = await dialog
    return answer


def _facts(job: dict[str, Any]) -> dict[str, str]:
    ending = "Ended" if job["ended"] is not None else "Runs" if job["alone"] is not None else "Waits"
    more = {name.capitalize(): text for name, text in facts(job).items() if name != "waits"}
    return {"Job": reference(job), ending: why(job)} | more


def _attempt(attempt: dict[str, Any], names: dict[str, str]) -> str:
    slots = [f"GPU {names.get(slot, slot)}" for slot in attempt["slots"]]
    return f"{exact_moment(attempt['started'] or attempt['placed'])}: {attempt_words(attempt | {'slots': slots})}"


def _lines(attempts: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Return used and promised memory as points of milliseconds and GiB, with a gap after each attempt.

    >>> used, promised = _lines([{"begin": 0.0, "step": 2.0, "values": [1 << 30, None], "promise": 2 << 30}])
    >>> [value for _, value in used], [value for _, value in promised]
    ([1.0, None, None], [2.0, 2.0, None])
    """
    used: list[Any] = []
    promised: list[Any] = []
    for each in attempts:
        begin, step = on_axis(each["begin"]), 1000 * each["step"]
        end = begin + step * len(each["values"])
        sizes = [None if value is None else round(value / GIB, 3) for value in each["values"]]
        used += [*([begin + place * step, size] for place, size in enumerate(sizes)), [end, None]]
        if each["promise"] is not None:
            promised += [*([at, round(each["promise"] / GIB, 3)] for at in (begin, end)), [end, None]]
    return used, promised


class LogTail:
    """The end of a job's growing output."""

    def __init__(self, ask: Callable[..., Awaitable[Any]], job: int, stream: str) -> None:
        self._ask, self._job, self._stream = ask, job, stream
        self._attempt: int | None = None
        self._offset: int | None = None  # None: start at the end
        self._raw = ""
        self.note = ""

    @property
    def text(self) -> str:
        """Return the text to show, with the last state of overwritten lines and without control characters."""
        return "\n".join(plain(line.rstrip("\r").rpartition("\r")[2]) for line in self._raw.split("\n"))

    async def more(self) -> bool:
        """Read new output; return whether there was any."""
        where = {"tail": _SHOWN} if self._offset is None else {"offset": self._offset}
        piece = await self._ask("logs", job=self._job, stream=self._stream, **where)
        if self._offset is not None and piece["attempt"] != self._attempt:
            self._raw, self._offset = "", None  # each attempt has its own file
            return await self.more()
        cut = self._offset is None and len(piece["text"]) >= _SHOWN // 2 and piece["offset"] > _SHOWN
        self._attempt, self._offset = piece["attempt"], piece["offset"]
        whole = self._raw + (piece["text"].partition("\n")[2] if cut else piece["text"])
        changed, self._raw = bool(piece["text"]), whole[-_SHOWN:]
        number = "" if self._attempt is None else f"of attempt {self._attempt}"
        file = f", which also writes to {plain(piece['file'])}" if piece["file"] else ""
        what = "The end of the output" if self._raw else "Nothing was written in the output"
        self.note = f"{what} {number}{file}." if number else "It has not started yet."
        return changed
