"""The page of the GPUs: a card each, with what is promised, what is used, and how busy it was in the last minutes."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from ullage.job_words import reference
from ullage.page.elements import Curve, box, set_prop, set_width, words
from ullage.page.frame import Frame
from ullage.page.readings import DaemonReading, Readings
from ullage.page.sessions import Session
from ullage.units import format_bytes

_COLOURS = 6  # classes job-0 to job-5 of page.css
_MOST_JOBS = 12  # that a card lists by name
_LEGEND = {"used": "used", "promised": "promised", "beyond": "more than promised", "free": "free",
           "foreign": "of others"}  # fmt: skip


async def show_gpus(session: Session) -> None:
    """Build the page."""
    frame = Frame(session, "GPUs", "/")
    with frame.main:
        summary = words("p", "", "summary")
        with box("p", "legend"):
            for kind, text in _LEGEND.items():
                box("span", f"dot {kind}").props["aria-hidden"] = "true"
                words("span", text)
        with box("div", "cards") as shelf:
            pass
    cards: dict[str, GPUCard] = {}

    async def refresh(reading: DaemonReading) -> None:
        summary.set_text(_summary(reading))
        if list(cards) != [gpu["id"] for gpu in reading.gpus]:
            cards.clear()
            shelf.clear()
            with shelf:
                cards.update({gpu["id"]: GPUCard(gpu, reading.places[gpu["id"]]) for gpu in reading.gpus})
        for gpu in reading.gpus:
            cards[gpu["id"]].show(gpu, reading.on_gpu(gpu["id"]), session.readings)

    await frame.from_the_first(refresh)


def _summary(reading: DaemonReading) -> str:
    counts = [f"{number:,} {state}" for state, number in reading.states.items()]
    about = reading.about
    return f"{about['gpus']} GPUs{' (virtual)' if about['virtual'] else ''}, policy {about['policy']}. Jobs: " + (
        ", ".join(counts) or "none"
    )


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0%}"


def _colours(jobs: list[int]) -> list[int]:
    """A colour for each job: by its number, so that it stays the same, but another one where that is taken.

    >>> _colours([1, 7, 8])
    [1, 2, 3]
    """
    chosen: list[int] = []
    for job in jobs:
        wanted = [(job + more) % _COLOURS for more in range(_COLOURS)]
        chosen.append(next((colour for colour in wanted if colour not in chosen), wanted[0]))
    return chosen


class GPUCard:
    """One GPU, or one MIG instance."""

    def __init__(self, gpu: dict[str, Any], name: str) -> None:
        kind = "MIG instance" if gpu["mig"] else "GPU"
        with box("section", "card") as self._card:
            self._card.props["aria-label"] = f"{kind} {name}"
            with box("div", "head"):
                words("h2", f"{kind} {name}")
                words("span", f"{gpu['name']}, {format_bytes(gpu['total'])}", "model")
                self._badge = words("span", "", "badge")
            with box("div", "bands") as self._bands:
                pass
            self._bands.props["role"] = "img"
            self._memory = words("p", "", "figures")
            with box("ul", "jobs") as self._jobs:
                pass
            self._curves = {name: Curve(name) for name in ("SMACT", "DRAMA", "power")}
            self._unknown = words("p", "", "figures")
        self._shown: list[int] = []
        self._parts: list[tuple[ui.element, ui.element, ui.element, Any]] = []
        self._foreign: ui.element = self._bands

    def show(self, gpu: dict[str, Any], jobs: list[dict[str, Any]], readings: Readings) -> None:
        """What the GPU does now."""
        state = "lost" if gpu["lost"] else "drained" if gpu["drained"] else "alone" if gpu["alone"] else ""
        why = gpu["drain_reason"] if state == "drained" and gpu["drain_reason"] else ""
        text = {"lost": "lost: it does not answer", "drained": "drained", "alone": "one job alone"}.get(state, "")
        self._badge.set_text(f"{text}: {why}" if why else text)
        self._card.classes(replace=f"card {state}")
        self._show_memory(gpu, jobs)
        watts, activity = gpu["power_w"], gpu["activity"]
        series = {"SMACT": readings.series("smact", gpu["id"]), "DRAMA": readings.series("drama", gpu["id"]),
                  "power": readings.series("power_w", gpu["id"])}  # fmt: skip
        highest = max((value for _, value in series["power"] if value is not None), default=0.0)
        self._curves["SMACT"].show(series["SMACT"], 1.0, _percent(activity["smact"]))
        self._curves["DRAMA"].show(series["DRAMA"], 1.0, _percent(activity["drama"]))
        self._curves["power"].show(
            series["power"], max(100.0, highest), "unknown" if watts is None else f"{watts:.0f} W"
        )
        missing = [name for name, figures in series.items() if all(value is None for _, value in figures)]
        for name, curve in self._curves.items():
            curve.row.set_visibility(name not in missing)
        self._unknown.set_text(f"Not measured here: {', '.join(missing)}." if missing else "")

    def _show_memory(self, gpu: dict[str, Any], jobs: list[dict[str, Any]]) -> None:
        if [job["id"] for job in jobs] != self._shown or not self._parts and self._foreign is self._bands:
            self._rebuild(jobs)
        total = gpu["total"] or 1
        for job, (promised, used, beyond, line) in zip(jobs, self._parts, strict=True):
            promise = total if gpu["alone"] or job["promise"] is None else job["promise"]
            most = max(promise, job["used"] or 0)
            set_width(promised, most / total)
            set_width(used, (job["used"] or 0) / most if most else 0.0)
            set_width(beyond, 1 - promise / most if most and job["over_promise"] else 0.0)
            set_prop(promised, "title", f"job {reference(job)}")
            if line is not None:
                used_of = "" if job["used"] is None else f"{format_bytes(job['used'])} of "
                line.set_text(f"{used_of}{format_bytes(job['promise'])} promised")
                line.classes(replace="over" if job["over_promise"] else "")
        set_width(self._foreign, gpu["foreign"] / total)
        figures = [] if gpu["used"] is None else [f"{format_bytes(gpu['used'])} used"]
        figures += [f"{format_bytes(gpu['promised'])} promised"]
        figures += [f"{format_bytes(gpu['foreign'])} of others"] if gpu["foreign"] else []
        text = f"{', '.join(figures)}, {format_bytes(gpu['free'])} free"
        self._memory.set_text(text)
        set_prop(self._bands, "aria-label", text)

    def _rebuild(self, jobs: list[dict[str, Any]]) -> None:
        self._shown, self._parts = [job["id"] for job in jobs], []
        self._bands.clear()
        self._jobs.clear()
        for place, (job, number) in enumerate(zip(jobs, _colours(self._shown), strict=True)):
            colour = f"job-{number}"
            with self._bands, box("div", f"band {colour}") as promised:
                used, beyond = box("div", "used"), box("div", "beyond")
            line = None
            if place < _MOST_JOBS:
                with self._jobs, box("li"):
                    box("span", f"dot {colour}").props["aria-hidden"] = "true"
                    ui.link(f"{reference(job)} {job['name']}", f"/job/{int(job['id'])}")
                    words("span", job["user"], "user")
                    line = words("span", "")
            self._parts.append((promised, used, beyond, line))
        if len(jobs) > _MOST_JOBS:
            with self._jobs:
                words("li", f"and {len(jobs) - _MOST_JOBS} more")
        with self._bands:
            self._foreign = box("div", "band foreign")
