"""What commands that speak to the daemon share: the client, jobs as arguments, and answers in lines."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.options import Json
from ullage.errors import InvalidValue
from ullage.units import format_bytes, format_duration, parse_duration

if TYPE_CHECKING:
    from ullage.manager.client import Client


JobNumber = Annotated[
    str, typer.Argument(help="A job: 17, 12_3 (of an array), or its name.", autocompletion=completion.jobs,
                        show_default=False, metavar="JOB")
]  # fmt: skip
JobNumbers = Annotated[
    list[str], typer.Argument(help="Jobs: 17, 12_3, 12_all (an array), or names.", autocompletion=completion.jobs,
                              show_default=False, metavar="JOB...")
]  # fmt: skip


def client() -> Client:
    """The client of this home's daemon."""
    from ullage.manager.client import Client

    return Client()


def print_json(answer: Any) -> None:
    """An answer of the daemon as it is."""
    print(json.dumps(answer))


def print_each(answers: list[dict[str, Any]], as_json: bool) -> None:
    """A line a job; exit code 1 if something could not be done for one of them."""
    if as_json:
        print_json(answers)
    else:
        for answer in answers:
            out = sys.stdout if answer["done"] else sys.stderr
            print(f"job {answer['job']} {answer['text']}" if answer["done"] else f"ullage: job {answer['job']}: "
                  f"{answer['text']}", file=out)  # fmt: skip
    if not all(answer["done"] for answer in answers):
        raise typer.Exit(1)


def memory(need: int | None) -> str:
    """A need in a table."""
    return "unknown" if need is None else format_bytes(need)


def label(job: dict[str, Any]) -> str:
    """A job's number in a table, with its place in an array."""
    return str(job["id"]) if job["array_id"] is None else f"{job['id']} ({job['array_id']}_{job['array_index']})"


# `ullage queue`: jobs that are not over, where they run and why they wait.


def queue(
    user: Annotated[str | None, typer.Option("--user", "-u", help="Only this user's jobs.")] = None,
    gpus: Annotated[bool, typer.Option("--gpus", help="The GPUs too: what is used, promised and left.")] = False,
    as_json: Json = False,
) -> None:
    """Show jobs that wait or run.

    Examples:

      ullage queue

      ullage queue --user ada --gpus
    """
    manager = client()
    jobs, cards = manager.queue(user), manager.gpus()
    if as_json:
        print_json({"jobs": jobs, "gpus": cards} if gpus else jobs)
        return
    from rich.console import Console

    console = Console()
    console.print(_job_table(jobs, {card["id"]: card["index"] for card in cards}) if jobs else "no jobs wait or run")
    if gpus:
        console.print(_gpu_table(cards))


def _job_table(jobs: list[dict[str, Any]], index: dict[str, int]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("job", "user", "name", "state", "GPU", "needs", "time", "why it waits, or where"):
        table.add_column(name, justify="right" if name in ("GPU", "needs", "time") else "left", no_wrap=name != "name")
    table.columns[-1].no_wrap = False
    for job in jobs:
        places = ", ".join(f"GPU {index.get(place, place)}" for place in job["gpus_used"])
        waits = not places
        words = job["reason"] if waits else f"on {places}" + (", alone" if job["alone"] else "")
        again = "again, " if job["recovery"] and waits else ""
        seconds = job["waited"] if waits else job["ran"]
        table.add_row(
            label(job), job["user"], Text(job["name"]), job["state"], str(job["gpus"]), memory(job["need"]),
            format_duration(round(seconds or 0.0)), Text(f"{again}{words or ''}"),
        )  # fmt: skip
    return table


def _gpu_table(cards: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("GPU", "name", "memory", "used", "promised", "left", "jobs", ""):
        table.add_column(name, justify="right" if name in ("GPU", "memory", "used", "promised", "left") else "left")
    for card in cards:
        state = "lost" if card["lost"] else "drained" if card["drained"] else ""
        table.add_row(
            str(card["index"]), card["name"], memory(card["total"]), memory(card["used"]), memory(card["promised"]),
            memory(card["free"]), " ".join(map(str, card["jobs"])), f"{state} {card['drain_reason'] or ''}".strip(),
        )  # fmt: skip
    return table


# `ullage status`: all that is known of a job, or of the daemon.


def status(
    job: Annotated[
        str | None, typer.Argument(help="A job: 17, 12_3 (of an array), 12_all, or its name.",
                                   autocompletion=completion.jobs, show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show a job's estimate, promise and attempts with their causes; without a job, the daemon.

    Examples:

      ullage status 17

      ullage status
    """
    if job is None:
        about = client().ping()
        print_json(about) if as_json else _print_daemon(about)
        return
    found = client().jobs(job)
    if as_json:
        print_json(found)
    else:
        print("\n\n".join("\n".join(_lines(one)) for one in found))


def _print_daemon(about: dict[str, Any]) -> None:
    kind = f"virtual {about['virtual']}" if about["virtual"] else f"{about['gpus']} GPUs"
    print(f"ullage {about['version']} serves {kind} (process {about['pid']}, since {_time(about['since'])})")
    print(f"policy {about['policy']}, sharing {about['sharing']}, estimator {about['estimator']}")
    counts = ", ".join(f"{count} {state}" for state, count in sorted(about["jobs"].items()))
    print(f"jobs: {counts or 'none yet'}")
    if about["trouble"]:
        print(f"TROUBLE: {about['trouble']}")


def _lines(job: dict[str, Any]) -> list[str]:
    lines = [f"job {label(job)}: {job['name']}, {job['state']}" + (f" ({job['detail']})" if job["detail"] else "")]
    if job.get("command"):
        lines += [f"  command    {shlex.join(job['command'])}", f"  folder     {job['cwd']}"]
    lines.append(f"  user       {job['user']}, priority {job['priority']}")
    lines.append(f"  needs      {job['gpus']} GPU, {memory(job['need'])}" + (", alone" if job["exclusive"] else ""))
    lines.append(f"  estimate   {job['estimate'] or 'under way'}")
    if job["reason"]:
        lines.append(f"  waits      {job['reason']}")
    spans = [f"waited {format_duration(job['waited'])}", f"ran {format_duration(job['ran'])}"]
    if job["completion"] is not None:
        spans.append(f"{format_duration(job['completion'])} in all")
    lines.append(f"  time       submitted {_time(job['submitted'])}; {', '.join(spans)}")
    for attempt in job["attempts"]:
        lines.append(f"  attempt {attempt['number']}  {_attempt(attempt)}")
    return lines


def _attempt(attempt: dict[str, Any]) -> str:
    alone = ", alone" if attempt["exclusive"] else ""
    words = f"on {', '.join(attempt['slots'])}, promised {memory(attempt['promised'])}{alone}"
    if attempt["gpu_memory"] is not None:
        words += f", took {memory(attempt['gpu_memory'])}"
    if attempt["cause"] is None:
        return f"{attempt['state']} {words}"
    ran = "" if attempt["elapsed"] is None else f" after {format_duration(attempt['elapsed'])}"
    more = "" if attempt["cause"] in ("finished", "cancelled") else f": {attempt['detail']}"
    return f"{attempt['cause']}{ran}{more} ({words})"


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


# `ullage logs`: what a job prints.


def logs(
    job: JobNumber,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")] = False,
    errors: Annotated[bool, typer.Option("--stderr", "-e", help="Standard error instead of output.")] = False,
    attempt: Annotated[int | None, typer.Option(help="Of this attempt; the newest by default.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Show the output of a job, from its beginning; -f goes on as it grows, over attempts too.

    Examples:

      ullage logs 17

      ullage logs -f 17

      ullage logs 17 --stderr --attempt 1
    """
    manager, stream = client(), "stderr" if errors else "stdout"
    if as_json:
        print_json({"job": job, "stream": stream, "text": manager.logs(job, stream, attempt)})
        return
    for text in manager.follow(job, stream, attempt) if follow else [manager.logs(job, stream, attempt)]:
        sys.stdout.write(text)
        sys.stdout.flush()


# `ullage cancel`: take jobs out of the queue, or stop those that run (SIGTERM, then SIGKILL).


def cancel(jobs: JobNumbers, as_json: Json = False) -> None:
    """Take jobs out of the queue, or stop those that run (SIGTERM, then SIGKILL).

    Examples:

      ullage cancel 17 18

      ullage cancel 12_all
    """
    print_each(client().cancel(*jobs), as_json)


# `ullage hold`: keep waiting jobs from starting.


def hold(jobs: JobNumbers, as_json: Json = False) -> None:
    """Keep waiting jobs from starting.

    Examples:

      ullage hold 17

      ullage hold 12_all
    """
    print_each(client().hold(*jobs), as_json)


# `ullage release`: let held jobs go on.


def release(jobs: JobNumbers, as_json: Json = False) -> None:
    """Let held jobs go on.

    Examples:

      ullage release 17

      ullage release 12_all
    """
    print_each(client().release(*jobs), as_json)


# Waits for jobs to be over; `ullage wait` and `ullage submit --wait`.

DONE, FAILED = 0, 1


def wait_for(manager: Client, jobs: list[str], timeout: float | None = None) -> list[dict[str, Any]]:
    """The jobs once all of them are over."""
    try:
        return manager.wait_all(jobs, timeout)
    except TimeoutError:
        raise InvalidValue(f"waited {format_duration(timeout)}; the jobs are not over") from None


def exit_code(jobs: list[dict[str, Any]]) -> int:
    """0 if all are done; a single job's own code; else 1."""
    if all(job["state"] == "done" for job in jobs):
        return DONE
    return int(jobs[0]["exit_code"] or FAILED) if len(jobs) == 1 else FAILED


def tell(jobs: list[dict[str, Any]], as_json: bool) -> None:
    """Say how jobs ended."""
    if as_json:
        print_json(jobs)
        return
    for job in jobs:
        print(f"job {label(job)} is {job['state']}" + (f": {job['detail']}" if job["state"] != "done" else ""))


# `ullage wait`: until jobs are over.


def wait(
    jobs: JobNumbers,
    timeout: Annotated[
        str | None, typer.Option(help="Give up after so long, such as 90s or 2h.", metavar="TIME")
    ] = None,
    as_json: Json = False,
) -> None:
    """Wait until jobs are over. Exits 0 if all are done, else with the job's own exit code, or 1.

    Examples:

      ullage wait 17

      ullage wait 12_all --timeout 2h
    """
    found = wait_for(client(), jobs, None if timeout is None else parse_duration(timeout))
    tell(found, as_json)
    raise typer.Exit(exit_code(found))


# `ullage history`: jobs that are over, with the time they waited, ran and took in all.


def history(
    limit: Annotated[int, typer.Option("--limit", "-n", help="How many.", min=1)] = 20,
    user: Annotated[str | None, typer.Option("--user", "-u", help="Only this user's jobs.")] = None,
    as_json: Json = False,
) -> None:
    """Show jobs that are over, the last one first.

    Examples:

      ullage history

      ullage history -n 1000 --json
    """
    jobs = client().history(limit, user)
    if as_json:
        print_json(jobs)
        return
    from rich.console import Console

    Console().print(_table(jobs) if jobs else "no job is over yet")


def _table(jobs: list[dict[str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("job", "user", "name", "state", "ended", "waited", "ran", "in all", "why it ended"):
        table.add_column(name, justify="right" if name in ("waited", "ran", "in all") else "left", no_wrap=True)
    table.columns[-1].no_wrap = False
    for job in jobs:
        ended = datetime.datetime.fromtimestamp(job["ended"]).strftime("%m-%d %H:%M:%S")
        cause = job["cause"] or ""
        more = job["detail"] or ""
        words = cause if job["state"] == "done" or more == cause else f"{cause}: {more}" if cause else more
        table.add_row(
            label(job), job["user"], Text(job["name"]), job["state"], ended, format_duration(job["waited"]),
            format_duration(job["ran"]), format_duration(job["completion"]), Text(words),
        )  # fmt: skip
    return table
