"""Texts about a job in the daemon's answers, for the command line and the page."""

import datetime
import shlex
from typing import Any

from ullage.units import format_bytes, format_duration

Job = dict[str, Any]
FULL_SPEED = 0.995  # share of its speed alone from which a job counts as undisturbed
_SHOWN = 5  # most jobs named in a text


def memory(size: int | None) -> str:
    return "unknown" if size is None else format_bytes(size)


def promised(job: Job) -> str:
    return ", ".join(map(memory, job["promises"] or [job["promise"]]))


def promised_on(job: Job, gpu: str) -> int | None:
    """Return the promise of a running job on one of its GPUs, by the GPU's id.

    >>> promised_on({"promise": 12, "promises": [5, 12], "gpus_used": ["GPU-1", "GPU-2"]}, "GPU-1")
    5
    """
    by_gpu = dict(zip(job["gpus_used"], job["promises"], strict=False))
    promise: int | None = by_gpu.get(gpu, job["promise"])
    return promise


def reference(job: Job) -> str:
    """Return the reference to a job for the command line; jobs of an array in one row share one.

    >>> reference({"id": 12, "array_id": 12, "array_index": 5, "jobs": 3, "indices": "5-7"})
    '12_[5-7]'
    """
    if job["array_id"] is None:
        return str(job["id"])
    return f"{job['array_id']}_{job['array_index'] if job.get('jobs', 1) == 1 else '[' + job['indices'] + ']'}"


def why(job: Job) -> str:
    """Return why a job waits, where it runs, or why it ended."""
    if job["ended"] is not None:
        cause, more = job["cause"] or "", job["detail"] or ""
        return cause if job["state"] == "done" or more in ("", cause) else f"{cause}: {more}" if cause else more
    estimating = f"its memory {job['estimating']}" if job["estimating"] else ""
    if job["alone"] is None:  # it has no live attempt
        again = "again, " if job["recovery"] else ""
        return again + "; ".join(filter(None, (job["reason"], estimating)))
    places = ", ".join(f"GPU {place}" for place in job["places"])
    over = f"USES {memory(job['used'])}, MORE THAN PROMISED" if job["over_promise"] else ""
    where = f"on {places}" if places else "without a GPU"
    if (job.get("speed") or 1.0) < FULL_SPEED:
        where += f" at {job['speed']:.0%} of its speed"
    words = ", ".join(filter(None, (over, where, "alone" if job["alone"] else "", host_share(job))))
    return "; ".join(filter(None, (words, job["reason"], estimating)))


def host_share(job: Job) -> str:
    """Return the cores and host memory promised to a job in words; "" if none."""
    cores = f"{job['cores']} core{'' if job['cores'] == 1 else 's'}" if job["cores"] else ""
    return ", ".join(filter(None, (cores, f"{memory(job['host_promise'])} host memory" if job["host_promise"] else "")))


def trial_words(answer: dict[str, Any]) -> list[str]:
    lines = []
    ahead = [answer["references"].get(str(number), str(number)) for number in answer["ahead"]]
    for start in answer["starts"][:_SHOWN]:
        who = "" if start["index"] is None else f"index {start['index']} "
        alone = ", alone" if start["alone"] else ""
        where = " on " + ", ".join(f"GPU {gpu}" for gpu in start["gpus"]) if start["gpus"] else ""
        slower = f", at {start['speed']:.0%} of its speed" if (start["speed"] or 1.0) < FULL_SPEED else ""
        lines.append(f"{who}would start now{where}{alone}{slower}")
    if len(answer["starts"]) > _SHOWN:
        lines.append(f"and {len(answer['starts']) - _SHOWN} more would start now")
    if answer["reason"]:
        others = answer["jobs"] - len(answer["starts"])
        who = "" if answer["jobs"] == 1 else f"{others} of {answer['jobs']} jobs "
        waits = "" if answer["reason"].startswith("would ") else "would wait: "
        lines.append(f"{who}{waits}{answer['reason']}")
    if ahead:
        more = f" and {len(ahead) - _SHOWN} more" if len(ahead) > _SHOWN else ""
        lines.append(f"before it in the queue: {', '.join(ahead[:_SHOWN])}{more}")
    if answer["behind"]:
        count = len(answer["behind"])
        lines.append(f"{count} job{'' if count == 1 else 's'} would stand behind it in the queue")
    lines.append(f"promise {memory(answer['promise'])} ({answer['estimate'] or 'not estimated yet'})")
    return lines


def facts(job: Job) -> dict[str, str]:
    texts = {} if job["array_id"] is None else {"number": str(job["id"])}
    if job.get("command"):
        texts |= {"command": shlex.join(job["command"]), "folder": job["cwd"]}
    alone = ", alone" if job["exclusive"] else ""
    where = f"{promised(job)} on {job['gpus']} GPU{'s' if job['gpus'] > 1 else ''}{alone}"
    estimating = f"its memory {job['estimating']}" if job["estimating"] else ""
    often = f"up to {job['retries']} times after failures of its own" if job.get("retries") else ""
    spans = [f"waited {format_duration(job['waited'])}", f"ran {format_duration(job['ran'])}"]
    spans += [] if job["completion"] is None else [f"{format_duration(job['completion'])} in all"]
    texts |= {
        "user": f"{job['user']}, priority {job['priority']}",
        "promise": where if job["gpus"] else "no GPU",
        "host": host_share(job),
        "estimate": "; ".join(filter(None, (job["estimate"], estimating))) or "given up, since the job ended",
        "expected": _expected(job) if job.get("utilization") else "",
        "after": ", ".join(job.get("after") or ()),
        "array": f"at most {job['throttle']} of its jobs run at once" if job.get("throttle") else "",
        "begin": f"not before {exact_moment(job['begin'])}" if job.get("begin") else "",
        "again": often or ("never" if job.get("requeue") is False else ""),
        "waits" if job["alone"] is None else "attention": job["reason"] or "",
        "time": f"submitted {exact_moment(job['submitted'])}; {', '.join(spans)}",
    }
    return {name: text for name, text in texts.items() if text}


def _expected(job: Job) -> str:
    usage = job["utilization"]
    alone = f"{format_duration(usage['step_s'])} a step alone on {usage['gpu']}, SMACT {usage['smact']:.0%} (predicted)"
    now = "" if job["speed"] is None else f"; {job['speed']:.0%} of that speed where it runs"
    least = "" if job["min_speed"] is None else f"; {job['min_speed']:.0%} at least on a shared GPU"
    return f"{alone}{now}{least}"


def attempt_words(attempt: dict[str, Any]) -> str:
    """Return an attempt's end, GPUs, promise and memory in words."""
    alone = ", alone" if attempt["exclusive"] else ""
    words = f"on {', '.join(attempt['slots'])}, promised {promised(attempt)}{alone}"
    words = words if attempt["slots"] else "without a GPU"
    if attempt["used"] is not None:
        words += f", used {memory(attempt['used'])}"
    if attempt["cause"] is None:
        return f"{attempt['state']} {words}"
    ran = "" if attempt["elapsed"] is None else f" after {format_duration(attempt['elapsed'])}"
    has_detail = attempt["detail"] and attempt["cause"] not in ("finished", "cancelled")
    more = f": {attempt['detail']}" if has_detail else ""
    return f"{attempt['cause']}{ran}{more} ({words})"


def exact_moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
