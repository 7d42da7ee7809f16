"""`ullage.Client`: submit jobs and follow them from Python, through the daemon's socket or its API."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.manager import client
from ullage.manager.http_line import HttpLine

_OVER = ("done", "failed", "cancelled")
_PATIENCE = 20.0  # seconds that one question about events may wait


class Client:
    """Speaks to the daemon of this home, of another one, or with `url` and `token` to any that serves its API.

        with ullage.Client() as manager:
            [job] = manager.submit(["python", "train.py"], memory="12GiB")
            print(manager.wait(job)["state"], manager.logs(job))

    What answers look like is in docs/operations.md; errors are `UllageError`s. Not covered: several threads at once.
    """

    def __init__(
        self,
        home: str | os.PathLike[str] | None = None,
        *,
        url: str | None = None,
        token: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        if (url is None) != (token is None):
            raise InvalidValue("needed both a url and a token for the API, or neither for the daemon's socket")
        self._line: client.Client | HttpLine
        if url is not None and token is not None:
            self._line = HttpLine(url, token, timeout)
        else:
            self._line = client.Client(None if home is None else Path(home), timeout)
        self._remote = url is not None

    def submit(
        self,
        what: Sequence[str] | str | os.PathLike[str],
        *,
        env: Mapping[str, str] | None = None,
        key: str | None = None,
        **options: Any,
    ) -> list[int]:
        """Submit a command (a list of words) or a job file (a path); the numbers of the jobs, several for an array.

        Options have the names of docs/job_files.md and come before what the file says. The job gets this process's
        folder (that of the job file, if it is one) and environment (through the API: the least that a program
        expects), unless others are given. The same `key` again gives the same jobs.
        """
        job = self._job(what, options)
        if env is not None or not self._remote:
            job["env"] = {**(os.environ if env is None else env), **job.get("env", {})}
        job.setdefault("cwd", os.getcwd())
        answer = self._line.call("submit", job=job, key=key or secrets.token_hex(16))
        return list(answer["jobs"])

    def _job(self, what: Sequence[str] | str | os.PathLike[str], options: dict[str, Any]) -> dict[str, Any]:
        from ullage.workload.job_files import make_job, read_job

        said: dict[str, Any] = {}
        if isinstance(what, str | os.PathLike):
            said = {"cwd": os.path.dirname(os.path.abspath(what)), **read_job(what).submission()}
        else:
            options = {"command": list(what), **options}
            if "cwd" in options:
                options["cwd"] = os.path.abspath(options["cwd"])
        if options:
            options.setdefault("command", said.get("command"))
            said |= make_job(options, "the job").submission()
        return said

    def queue(self, user: str | None = None) -> list[dict[str, Any]]:
        """Jobs that are not over."""
        return list(self._line.call("queue", user=user))

    def history(self, limit: int = 50, user: str | None = None) -> list[dict[str, Any]]:
        """Jobs that are over, the last one first."""
        return list(self._line.call("history", limit=limit, user=user))

    def status(self, job: int | str) -> dict[str, Any]:
        """All about one job."""
        found = self._line.call("status", job=job)
        if len(found) != 1:
            raise InvalidValue(f"needed one job; {job} means {len(found)}")
        return dict(found[0])

    def logs(self, job: int | str, stream: str = "stdout", attempt: int | None = None) -> str:
        """What a job has written so far."""
        return "".join(self._pieces(job, stream, attempt, follow=False))

    def follow(self, job: int | str, stream: str = "stdout") -> Iterator[str]:
        """What a job writes, piece by piece, until it is over."""
        return self._pieces(job, stream, None, follow=True)

    def _pieces(self, job: int | str, stream: str, attempt: int | None, follow: bool) -> Iterator[str]:
        offset, known = 0, attempt
        while True:
            piece = self._line.call("logs", job=job, stream=stream, offset=offset, attempt=attempt)
            if attempt is None and known is not None and piece["attempt"] != known:
                offset, known = 0, piece["attempt"]  # another attempt has begun
                continue
            offset, known = piece["offset"], piece["attempt"]
            if piece["text"]:
                yield piece["text"]
            elif piece["over"] or not follow:
                return
            else:
                time.sleep(0.2)

    def wait(self, job: int | str, timeout: float | None = None) -> dict[str, Any]:
        """The job once it is over; `TimeoutError` if that takes longer than `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        last = int(self._line.call("ping")["last_event"])
        while True:
            found = self.status(job)
            if found["state"] in _OVER:
                return found
            left = _PATIENCE if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"job {job} is {found['state']} after {timeout:g} s")
            last = int(self._line.call("events", since=last, wait=min(left, _PATIENCE))["last"])

    def events(self, since: int = 0, wait: float = 0.0) -> Iterator[dict[str, Any]]:
        """What happened after event number `since`, as long as there is more within `wait` seconds."""
        while True:
            found = self._line.call("events", since=since, wait=wait)
            if not found["events"]:
                return
            yield from found["events"]
            since = int(found["last"])

    def cancel(self, *jobs: int | str) -> list[dict[str, Any]]:
        """Take jobs out of the queue, or stop them if they run."""
        return list(self._line.call("cancel", jobs=list(jobs)))

    def hold(self, *jobs: int | str) -> list[dict[str, Any]]:
        """Keep waiting jobs from starting."""
        return list(self._line.call("hold", jobs=list(jobs)))

    def release(self, *jobs: int | str) -> list[dict[str, Any]]:
        """Let held jobs go on."""
        return list(self._line.call("release", jobs=list(jobs)))

    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs now."""
        return list(self._line.call("gpus"))

    def drain(self, gpu: int | str, reason: str = "") -> dict[str, Any]:
        """No new jobs for a GPU."""
        return dict(self._line.call("drain", gpu=gpu, reason=reason))

    def resume(self, gpu: int | str) -> dict[str, Any]:
        """New jobs for a GPU again."""
        return dict(self._line.call("resume", gpu=gpu))

    def ping(self) -> dict[str, Any]:
        """What the daemon is."""
        return dict(self._line.call("ping"))

    def close(self) -> None:
        """End the connection; the next question makes another one."""
        self._line.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
