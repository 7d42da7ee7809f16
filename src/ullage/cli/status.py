"""`ullage status`: all that is known of a job, or of the daemon."""

from __future__ import annotations

import datetime
import shlex
from typing import Annotated, Any

import typer

from ullage.cli import completion
from ullage.cli.job_client import client, label, memory, print_json
from ullage.cli.options import Json
from ullage.units import format_duration


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
    daemon = client()
    answer = daemon.call("ping") if job is None else daemon.call("status", job=job)
    if as_json:
        print_json(answer)
    elif job is None:
        _print_daemon(answer)
    else:
        print("\n\n".join("\n".join(_lines(one)) for one in answer))


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
