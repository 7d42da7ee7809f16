"""The page of the GPUs: a card for each, with promised and used memory, and its activity in the last minutes."""

from typing import Any

from nicegui import ui

from ullage.manager.job_words import promised_on, reference
from ullage.manager.page.elements import box, curve, percent_of, set_prop, words
from ullage.manager.page.frame import Frame
from ullage.manager.page.readings import DaemonReading, Readings
from ullage.manager.page.sessions import Session
from ullage.units import format_bytes

_COLOURS = 6  # classes job-0 to job-5 of page.css
_MOST_JOBS = 12  # most jobs that a card lists by name
_LEGEND = [
    ("used", "used"),
    ("promised", "promised"),
    ("beyond", "more than promised"),
    ("free", "free"),
    ("foreign", "of others"),
]
_STATES = {"lost": "lost: it does not answer", "drained": "drained", "alone": "one job alone", "": ""}


async def show_gpus(session: Session) -> None:
    frame = Frame(session, "GPUs")
    with frame.main:
        summary = words("p", "", "summary")
        with box("p", "legend"):
            for kind, text in _LEGEND:
                box("span", f"dot {kind}").props["aria-hidden"] = "true"
                words("span", text)
        shelf = box("div", "cards")
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


def _colours(jobs: list[int]) -> list[int]:
    """Choose a colour for each job, by its number so that it stays the same, or the next free colour.

    >>> _colours([1, 7, 8])
    [1, 2, 3]
    """
    chosen: list[int] = []
    for job in jobs:
        wanted = [(job + more) % _COLOURS for more in range(_COLOURS)]
        chosen.append(next((colour for colour in wanted if colour not in chosen), wanted[0]))
    return chosen


class GPUCard(ui.element, component="static/gpu_card.js"):
    """The card of a GPU or MIG instance, as one element for speed, since a server may have many."""

    def __init__(self, gpu: dict[str, Any], name: str) -> None:
        super().__init__()
        self._title = f"{'MIG instance' if gpu['mig'] else 'GPU'} {name}"

    def show(self, gpu: dict[str, Any], jobs: list[dict[str, Any]], readings: Readings) -> None:
        state = next((name for name in ("lost", "drained", "alone") if gpu[name]), "")
        why = gpu["drain_reason"] if state == "drained" else None
        curves, missing = [], []
        for name, field in (("SMACT", "smact"), ("DRAMA", "drama"), ("power", "power_w")):
            figures = readings.series(field, gpu["id"])
            known = [value for _, value in figures if value is not None]
            if not known:
                missing.append(name)
                continue
            now = gpu["power_w"] if name == "power" else gpu["activity"][field]
            text = "unknown" if now is None else f"{now:.0f} W" if name == "power" else f"{now:.0%}"
            curves.append(curve(name, figures, max(100.0, *known) if name == "power" else 1.0, text))
        colours = [f"job-{number}" for number in _colours([job["id"] for job in jobs])]
        lines = list(zip(jobs, colours, strict=True))
        card = {
            "title": self._title,
            "model": f"{gpu['name']}, {format_bytes(gpu['total'])}",
            "state": state,
            "badge": f"{_STATES[state]}: {why}" if why else _STATES[state],
            "memory": _memory(gpu),
            "bands": [_band(gpu, job, colour) for job, colour in lines],
            "foreign": percent_of(gpu["foreign"] / (gpu["total"] or 1)),
            "jobs": [_line(gpu, job, colour) for job, colour in lines[:_MOST_JOBS]],
            "more": f"and {len(jobs) - _MOST_JOBS} more" if len(jobs) > _MOST_JOBS else "",
            "curves": curves,
            "unknown": f"Not measured here: {', '.join(missing)}." if missing else "",
        }
        set_prop(self, "card", card)


def _memory(gpu: dict[str, Any]) -> str:
    figures = [] if gpu["used"] is None else [f"{format_bytes(gpu['used'])} used"]
    figures += [f"{format_bytes(gpu['promised'])} promised"]
    figures += [f"{format_bytes(gpu['foreign'])} of others"] if gpu["foreign"] else []
    return f"{', '.join(figures)}, {format_bytes(gpu['free'])} free"


def _band(gpu: dict[str, Any], job: dict[str, Any], colour: str) -> dict[str, Any]:
    """Return a job's promise and use as shares of the GPU's memory."""
    total = gpu["total"] or 1
    known = promised_on(job, gpu["id"])
    promise = total if gpu["alone"] or known is None else known
    most = max(promise, job["used"] or 0)
    return {
        "id": job["id"],
        "colour": colour,
        "title": f"job {reference(job)}",
        "width": percent_of(most / total),
        "used": percent_of((job["used"] or 0) / most if most else 0.0),
        "beyond": percent_of(1 - promise / most if most and job["over_promise"] else 0.0),
    }


def _line(gpu: dict[str, Any], job: dict[str, Any], colour: str) -> dict[str, Any]:
    used = "" if job["used"] is None else f"{format_bytes(job['used'])} of "
    return {
        "id": job["id"],
        "colour": colour,
        "href": f"/job/{int(job['id'])}",
        "name": f"{reference(job)} {job['name']}",
        "user": job["user"],
        "figures": f"{used}{format_bytes(promised_on(job, gpu['id']))} promised",
        "over": bool(job["over_promise"]),
    }
