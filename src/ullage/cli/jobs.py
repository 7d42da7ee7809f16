"""Commands about jobs: `ullage queue`, `status`, `logs`, `cancel`, `wait` and `report`."""

import datetime
import inspect
import json
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from itertools import zip_longest
from typing import Annotated, Any, get_args

import typer

from ullage.cli import completion
from ullage.cli.exit_codes import DONE, FAILED
from ullage.cli.job_tables import FORMAT_HELP, OVER, QUEUE, chosen, show
from ullage.cli.options import MOMENT_FORMS, Json, Options, argument, option, with_options
from ullage.cli.tables import fitted, text_width
from ullage.errors import InvalidValue, UllageError
from ullage.manager import verbs
from ullage.manager.client import Client
from ullage.manager.job_words import attempt_words, exact_moment, facts, memory, reference
from ullage.manager.report_words import COLUMNS, cells_of, csv_of, failures, moment
from ullage.text import plain, plain_values
from ullage.units import format_duration, parse_duration

_MANY, _LATEST = 10, 20  # equal answers that share a line; finished jobs to list


def option_of(argument: Any, *spelling: str, **shown: Any) -> Any:
    """Make an option for an argument of a verb (`ullage.manager.verbs`), with its help and minimum."""
    about = get_args(argument)[1]
    least = next((limit.ge for limit in about.metadata if hasattr(limit, "ge")), None)
    return option(about.description, *spelling, min=least, **shown)


JOBS_HELP = "Job numbers (17), array jobs (12_3), whole arrays (12_all) or names."
JobNumber = Annotated[str, argument("Job number (17), array job (12_3) or name.", "JOB", completion.jobs)]
JobNumbers = Annotated[list[str], argument(JOBS_HELP, "JOB", completion.jobs)]
User = Annotated[str | None, option_of(verbs.User, "--user -u NAME")]
Scope = Annotated[str, option_of(verbs.TokenScope, "|".join(verbs.SCOPES), complete=[*verbs.SCOPES])]


def print_json(answer: Any) -> None:
    print(json.dumps(answer))


def print_each(answers: list[dict[str, Any]], as_json: bool) -> None:
    """Print one line for each job. Exit with 1 if the order failed for one of them."""
    if as_json:
        print_json(answers)
    else:
        _print_answers(plain_values(answers))
    if not all(answer["done"] for answer in answers):
        raise typer.Exit(FAILED)


def _print_answers(answers: list[dict[str, Any]]) -> None:
    """Print a line for each job; many jobs with the same answer share one."""
    alike: dict[tuple[bool, str], list[str]] = {}
    for answer in answers:
        alike.setdefault((answer["done"], answer["text"]), []).append(answer["reference"])
    for (done, text), jobs in alike.items():
        target = sys.stdout if done else sys.stderr
        if len(jobs) > _MANY:
            print(f"{'' if done else 'ullage: '}{len(jobs):,} jobs, {jobs[0]} to {jobs[-1]}: {text}", file=target)
            continue
        for job in jobs:
            print(f"job {job} {text}" if done else f"ullage: job {job}: {text}", file=target)


def queue(
    user: User = None,
    every: Annotated[bool, option("Show each array job in its own row.", "--all -a")] = False,
    over: Annotated[bool, option("Show finished jobs, the latest first.", "--over")] = False,
    limit: Annotated[int | None, option_of(verbs.Rows, "--limit -n N", default="20 of --over")] = None,
    columns: Annotated[str | None, option(FORMAT_HELP, "--format COLUMNS", complete=completion.columns)] = None,
    gpus: Annotated[bool, option("Also show used, promised and free memory of each GPU.", "--show-gpus")] = False,
    as_json: Json = False,
) -> None:
    """List waiting and running jobs, or finished ones.

    Shows why each job waits, where it runs, and whether it exceeds its promise. Waiting array jobs share a row, such
    as 12_[5-10000]; other commands accept that name. Finished jobs show how long they waited and ran, and why they
    ended.

    A terminal shows a long table in a pager (PAGER). A pipe or a file gets tab-separated values: bytes, seconds, and
    seconds since 1970.

    Examples:

      ullage queue --user ada --show-gpus
      ullage queue --over --all --format id,user,ran,exit
    """
    names, manager = chosen(columns or (OVER if over else QUEUE)), Client()
    if over:
        _show_over(manager, user, verbs.MOST_ROWS if every else limit or _LATEST, names, as_json)
        return
    if as_json:
        jobs = manager.queue(user, limit)
        print_json({"jobs": jobs, "gpus": manager.gpus()} if gpus else jobs)
        return
    cards = manager.gpus()
    index = {card["id"]: card["index"] for card in cards}
    rows, foot = _rows(manager, user, every, limit)
    for row in rows:
        row["places"] = [index.get(place, place) for place in row["gpus_used"]]
    if rows or not sys.stdout.isatty():
        show(rows, names, foot)
    else:
        print("no jobs are waiting or running")
    if gpus:
        print(_gpu_table(plain_values(cards), shutil.get_terminal_size().columns))
        print(_host_line(manager.ping()))


def _show_over(manager: Client, user: str | None, limit: int, names: list[str], as_json: bool) -> None:
    jobs = manager.history(limit, user)
    if as_json:
        print_json(jobs)
    elif jobs or not sys.stdout.isatty():
        show([job | {"places": []} for job in jobs], names)
    else:
        print("no jobs have ended yet")


def _rows(manager: Client, user: str | None, every: bool, limit: int | None) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of the queue, and the line below them."""
    if every:
        return manager.queue(user, limit), ""
    page = manager.folded_queue(user, limit)
    rows = list(page["rows"])
    more = page["all_rows"] - len(rows)
    counts = ", ".join(f"{number:,} {state}" for state, number in sorted(page["states"].items()))
    if more:
        return rows, f"{more:,} more rows; {page['jobs']:,} jobs in all: {counts}"
    return rows, f"{page['jobs']:,} jobs: {counts}" if page["jobs"] > len(rows) else ""


def _host_line(about: dict[str, Any]) -> str:
    host = about["host"]
    cores = f"{host['free_cores']} of {host['cores']} cores"
    return f"host: {cores} and {memory(host['free_memory'])} of {memory(host['memory'])} host memory are free"


def _gpu_table(cards: list[dict[str, Any]], width: int) -> str:
    """Return a line for each GPU, with its jobs and remarks at the end, or below it if there is no room."""
    rows = [
        [str(card["index"]), card["name"], *(memory(card[key]) for key in ("total", "used", "promised", "free"))]
        for card in cards
    ]
    head, *lines = fitted(("GPU", "name", "memory", "used", "promised", "free"), rows, left=("name",)).split("\n")
    shown = [f"{head}  jobs"]
    for card, line in zip(cards, lines, strict=True):
        state = "lost" if card["lost"] else "drained" if card["drained"] else ""
        bookings = "; ".join(each["text"] for each in card["bookings"])
        remarks = " ".join(filter(None, (state, card["drain_reason"], bookings)))
        remark = "  ".join(filter(None, (" ".join(map(str, card["jobs"])), remarks)))
        if text_width(line) + 2 + text_width(remark) <= width:
            shown.append(f"{line}  {remark}".rstrip())
        else:
            shown += [line, *textwrap.wrap(remark, width, initial_indent="    ", subsequent_indent="    ")]
    return "\n".join(shown)


def status(
    job: Annotated[str | None, argument(verbs.JobReference.__metadata__[0].description, "JOB", completion.jobs)] = None,
    as_json: Json = False,
) -> None:
    """Show a job in detail, or the state of the daemon.

    With JOB: its command, its promise with the source, and every attempt with its cause. Without JOB: the daemon's
    version, policy and number of jobs.

    Examples:

      ullage status 17
      ullage status
    """
    if job is None:
        about = Client().ping()
        print_json(about) if as_json else _print_daemon(plain_values(about))
        return
    records = Client().jobs(job)
    if as_json:
        print_json(records)
    else:
        print("\n\n".join("\n".join(_lines(one)) for one in plain_values(records)))


def _print_daemon(about: dict[str, Any]) -> None:
    kind = f"virtual {about['virtual']}" if about["virtual"] else f"{about['gpus']} GPUs"
    print(f"ullage {about['version']} serves {kind} (process {about['pid']}, since {exact_moment(about['since'])})")
    print(f"policy {about['policy']}, sharing {about['sharing']}, estimator {about['estimator']}")
    print(_host_line(about))
    counts = ", ".join(f"{count} {state}" for state, count in sorted(about["jobs"].items()))
    print(f"jobs: {counts or 'none yet'}")
    for number, reason in about["damaged"].items():
        print(f"DAMAGED: job {number} is set aside, since it cannot be read: {reason}")
    if about["trouble"]:
        print(f"TROUBLE: {about['trouble']}")


def _lines(job: dict[str, Any]) -> list[str]:
    lines = [f"job {reference(job)}: {job['name']}, {job['state']}" + (f" ({job['detail']})" if job["detail"] else "")]
    lines += [f"  {name:11}{text}" for name, text in facts(job).items()]
    return lines + [f"  attempt {each['number']}  {attempt_words(each)}" for each in job["attempts"]]


def logs(
    job: JobNumber,
    follow: Annotated[bool, option("Print new output until the job ends, across attempts.", "--follow -f")] = False,
    errors: Annotated[bool, option("Print standard error instead of standard output.", "--stderr")] = False,
    attempt: Annotated[int | None, option_of(verbs.Attempt, "N", default="the newest")] = None,
    as_json: Json = False,
) -> None:
    """Print a job's output.

    In a terminal, control characters in another user's output become '?'.

    Examples:

      ullage logs -f 17
      ullage logs 17 --stderr --attempt 1
    """
    manager, stream = Client(), "stderr" if errors else "stdout"
    if as_json:
        print_json({"job": job, "stream": stream, "text": manager.logs(job, stream, attempt)})
        return
    foreign = sys.stdout.isatty() and manager.status(job)["user"] != manager.ping()["you"]
    for text in manager.follow(job, stream, attempt) if follow else [manager.logs(job, stream, attempt)]:
        sys.stdout.write("\n".join(map(plain, text.split("\n"))) if foreign else text)
        sys.stdout.flush()


def of_verb(
    verb: str, help: str, named: Any, text: Callable[[dict[str, Any]], str] = str, options: Options | None = None
) -> Callable[..., None]:
    """Make a command that calls a verb for all names and prints the answers; `text` formats those not about jobs."""
    one = re.findall(r"{(\w+)}", verbs.VERBS[verb].path)[0]

    @with_options({"names": (named, inspect.Parameter.empty), **(options or {}), "as_json": (Json, False)})
    def command(**arguments: Any) -> None:
        names, as_json, manager = arguments.pop("names"), arguments.pop("as_json"), Client()
        if one == "job":
            print_each(manager.call(verb, jobs=names, **arguments), as_json)
            return
        answers = [manager.call(verb, **{one: name}, **arguments) for name in names]
        print_json(answers) if as_json else print("\n".join(map(text, plain_values(answers))))

    command.__doc__ = help
    return command


cancel = of_verb(
    "cancel",
    """Cancel jobs, waiting or running.

    A running job gets SIGTERM, then SIGKILL if it has not ended after a grace period.

    Examples:

      ullage cancel 17 18
      ullage cancel 12_all
    """,
    JobNumbers,
)


def wait_for(manager: Client, jobs: list[str], timeout: float | None = None) -> list[dict[str, Any]]:
    try:
        return manager.wait_all(jobs, timeout)
    except TimeoutError:
        raise UllageError(f"waited {format_duration(timeout)}; the jobs are not over") from None


def exit_code(jobs: list[dict[str, Any]]) -> int:
    """Return 0 if all jobs are done, else the exit code of a single job, or 1 for several."""
    if all(job["state"] == "done" for job in jobs):
        return DONE
    return int(jobs[0]["exit_code"] or FAILED) if len(jobs) == 1 else FAILED


def tell(jobs: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(jobs)
        return
    for job in plain_values(jobs):
        why = job["detail"] or job["cause"]
        print(f"job {reference(job)} is {job['state']}" + (f": {why}" if why and job["state"] != "done" else ""))


def wait(
    jobs: JobNumbers,
    timeout: Annotated[
        str | None, option("Give up after this long, such as 90s or 2h.", "TIME", default="never")
    ] = None,
    as_json: Json = False,
) -> None:
    """Wait until jobs end.

    Exits with 0 if all jobs succeeded, with the job's own exit code if a single job failed, and with 1 otherwise.

    Example:

      ullage wait 12_all --timeout 2h
    """
    ended = wait_for(Client(), jobs, None if timeout is None else parse_duration(timeout))
    tell(ended, as_json)
    raise typer.Exit(exit_code(ended))


_MAY_BE_EMPTY = ("core hours", "energy")
_GIVE_WAY = ("core hours", "energy", "90%", "by part", "promised", "used")  # in a narrow terminal, the first one first


def report(
    by: Annotated[
        str, option("Group rows by user, day, name, gpu, or several.", "KEYS", complete=completion.report_keys)
    ] = "user,day",
    since: Annotated[str, option(f"Start: {MOMENT_FORMS}.", "TIME")] = "7d",
    until: Annotated[str | None, option("End, in the same form.", "TIME", default="now")] = None,
    user: User = None,
    as_csv: Annotated[bool, option("Print CSV.", "--csv")] = False,
    as_json: Json = False,
) -> None:
    """Report usage: GPU hours, memory, energy, waiting times and failures.

    "by part" weights each GPU by the promised part of its memory. "promised" and "used" are means over time. "waited"
    is the median and the 90th percentile. Operators see all users; others see their own jobs, and more if the daemon's
    settings allow it.

    Examples:

      ullage report --by user --since 30d
      ullage report --by day,gpu --since 2026-11-01 --until 2026-12-01 --csv
    """
    if as_csv and as_json:
        raise InvalidValue("--csv and --json exclude each other, got both; leave one out")
    now = time.time()
    keys = [key.strip() for key in by.split(",")]
    usage = Client().report(keys, moment(since, now), None if until is None else moment(until, now), user)
    if as_json:
        print_json(usage)
    elif as_csv:
        print(csv_of(usage), end="")
    else:
        _print_table(usage)


def _print_table(usage: dict[str, Any]) -> None:
    moments = (datetime.datetime.fromtimestamp(usage[name]) for name in ("since", "until"))
    span = " to ".join(each.strftime("%Y-%m-%d %H:%M") for each in moments)
    if not usage["rows"]:
        print(f"no jobs ran from {span}")
        return
    print(span)
    print(usage_table(usage, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))


def usage_table(usage: dict[str, Any], width: int | None) -> str:
    """Return the report as a table, without unused and unknown figures and the columns that do not fit the width."""
    rows, keys = usage["rows"], usage["by"]
    lines = [[plain(str(row[key])) for key in keys] + cells_of(row) for row in rows]
    if len(rows) > 1:
        lines.append(["total"] + [""] * (len(keys) - 1) + cells_of(usage["total"]))
    columns = zip([*keys, *COLUMNS], *lines, strict=True)
    shown = [column for column in columns if column[0] not in _MAY_BE_EMPTY or {*column[1:]} - {"0.00", "unknown"}]
    heads, *cells = zip(*shown, strict=True)
    give_way = [name for name in _GIVE_WAY if name in heads]
    head, *text = fitted(heads, cells, give_way=give_way, left=keys, width=width or sys.maxsize).split("\n")
    with_failures = [head]
    for line, row in zip_longest(text, rows):  # a total and a note follow the rows
        with_failures += [line, f"    {failures(row['failures'])}"] if row and row["failures"] else [line]
    return "\n".join(with_failures)
