"""`ullage.manager.Client`: submit jobs and follow them from Python. The command line uses it too.

The two ways to reach the daemon are in `ullage.manager.transport`.
"""

import codecs
import math
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.errors import InvalidValue, NoDaemon
from ullage.manager.job_words import reference
from ullage.manager.transport import RemoteTransport, Transport

if TYPE_CHECKING:
    from ullage.jobs.job_files import JobSpec

    _What = JobSpec | Sequence[str] | str | os.PathLike[str]

_OVER = ("done", "failed", "cancelled")
_REST = 4.0  # pause before the next request, as a multiple of the time that the last answer took
_EVENT_WAIT, _LOG_WAIT = 5.0, 0.5  # seconds that a request may wait for events, and for output


class Client:
    """A client of the daemon of this or another home, or with `url` and `token` of any daemon that serves its API.

        with ullage.manager.Client() as manager:
            [job] = manager.submit(["python", "train.py"], memory="12GiB")
            print(manager.wait(job)["state"], manager.logs(job))

    Errors are `UllageError`s. A client is not thread-safe.
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
            raise InvalidValue("url and token must both be given for the API, or neither for the daemon's socket")
        self._remote = url is not None
        if url is not None and token is not None:
            self._transport: Transport = RemoteTransport(url, token, timeout)
        else:
            self._transport = Transport(None if home is None else Path(home), timeout)

    def call(self, verb: str, wait: float = 0.0, **arguments: Any) -> Any:
        """Send any order of `ullage.manager.core.orders.Orders`; the methods below cover the usual ones.

        With `wait`, the daemon may wait that many seconds for news before it answers `events` or `estimated`.
        """
        return self._transport.call(verb, wait, arguments)

    def submit(
        self, what: "_What", *, env: Mapping[str, str] | None = None, key: str | None = None, **options: Any
    ) -> list[int]:
        """Submit a command (a list of words), a job file (a path) or a `JobSpec`. Returns the numbers of the jobs.

        Options have the names of the fields of a job file and override what the file says. Unless others are given,
        the job gets this process's working directory (for a job file: the file's folder) and environment. Through the
        API it gets a minimal environment instead. The same `key` again returns the same jobs.
        """
        return list(self.submit_spec(self._complete(what, env, options), key)["jobs"])

    def dry_run(
        self, what: "_What", *, env: Mapping[str, str] | None = None, expected: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """Return whether and where a job would start if you submitted it now, as for `submit`; store and start nothing.

        `expected` is the id of an estimate of its command (`estimate`), which gives its memory and speed.
        """
        return self.dry_run_spec(self._complete(what, env, options), expected)

    def dry_run_spec(self, spec: "JobSpec", expected: str | None = None) -> dict[str, Any]:
        """Dry-run a complete job."""
        return dict(self.call("dry_run", job=spec.to_dict(), estimate=expected))

    def _complete(self, what: "_What", env: Mapping[str, str] | None, options: dict[str, Any]) -> "JobSpec":
        spec = self._spec(what, options)
        values: dict[str, Any] = {"cwd": spec.cwd or os.getcwd()}
        if env is not None or not self._remote:
            values["env"] = {**(os.environ if env is None else env), **spec.env}
        return spec.with_changes(**values)

    def _spec(self, what: "_What", options: dict[str, Any]) -> "JobSpec":
        from ullage.jobs.job_files import JobSpec, make_job, read_job

        if isinstance(what, JobSpec):
            return what.with_changes(**options) if options else what
        if isinstance(what, str | os.PathLike):
            spec = read_job(what).spec
            return spec.with_changes(**{"cwd": spec.cwd or os.path.dirname(os.path.abspath(what)), **options})
        return make_job({"command": list(what), **options}, "the job")

    def submit_spec(self, spec: "JobSpec", key: str | None = None, patience: float = 0.0) -> dict[str, Any]:
        """Submit a complete job unchanged. Returns the daemon's whole answer: jobs, state, promise and notes.

        If no answer comes, sends the job again for up to `patience` seconds; this never makes a second job.
        """
        key = key or secrets.token_hex(16)
        deadline = time.monotonic() + patience
        while True:
            try:
                return dict(self.call("submit", job=spec.to_dict(), key=key))
            except NoDaemon:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)

    def estimate(self, timeout: float | None = None, **question: Any) -> dict[str, Any]:
        """Ask the daemon for an estimate without a job, and wait for the answer.

            answer = Client().estimate(model="timm:vit_small_patch16_224", options={"batch_size": 64}, gpu="T4")
            print(answer["estimates"][0]["upper"])

        The question has a `model`, a `script` (its text) with `args`, or a `command`; and `options`, `gpu` (one name or
        several), `estimator`, `cwd`, `env`, `venv`, `conda`, `details` (`EstimateSpec`). The daemon stores the answer
        under its `id`; `estimated` returns it again. Raises `TimeoutError` if it takes longer than `timeout` seconds.
        """
        deadline = _deadline(timeout)
        answer = dict(self.call("estimate", question=question))
        while answer["state"] == "waiting":
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"waited {timeout:g} s: estimate {answer['id']} {answer['reason'] or 'is not there'}"
                )
            answer = self.estimated(answer["id"], min(left, _EVENT_WAIT))
        return answer

    def estimated(self, id: str, wait: float = 0.0) -> dict[str, Any]:
        """Return an estimate that you requested, by its id; wait up to `wait` seconds for its result."""
        return dict(self.call("estimated", wait, estimate=id))

    def cancel_estimate(self, id: str) -> None:
        """Cancel an estimate that you requested and that is not finished."""
        self.call("cancel_estimate", estimate=id)

    def estimates(self, limit: int = 50) -> list[dict[str, Any]]:
        """Return the estimates that you requested without a job, newest first, without their results."""
        return list(self.call("estimates", limit=limit))

    def queue(self, user: str | None = None, limit: int | None = None, offset: int = 0) -> list[dict[str, Any]]:
        """Return the unfinished jobs, or a page of them."""
        return list(self.call("queue", user=user, limit=limit, offset=offset))

    def folded_queue(
        self, user: str | None = None, limit: int | None = None, offset: int = 0, live: bool = False
    ) -> dict[str, Any]:
        """Return the queue in fewer rows: jobs of an array that wait in the same state share one.

        A row is its first job, with the number of `jobs` that it stands for and their `indices`. Besides the `rows`:
        `all_rows`, and the number of `jobs`, also by `states`.
        """
        return dict(self.call("folded_queue", user=user, limit=limit, offset=offset, live=live))

    def history(self, limit: int = 50, user: str | None = None) -> list[dict[str, Any]]:
        """Return the finished jobs, the latest first."""
        return list(self.call("history", limit=limit, user=user))

    def jobs(self, job: int | str) -> list[dict[str, Any]]:
        """Return all details of the jobs that a reference means: `17`, `12_3`, `12_all` or a name."""
        return list(self.call("status", job=job))

    def memory(self, job: int | str) -> dict[str, Any]:
        """Return the memory of a job over time: for each of its `attempts`, from `begin` (seconds since 1970) on, the
        bytes that it held on one GPU (`values`), every `step` seconds; `None` if not measured."""
        return dict(self.call("memory", job=job))

    def status(self, job: int | str) -> dict[str, Any]:
        """Return all details of one job."""
        return _only(job, self.jobs(job))

    def logs(self, job: int | str, stream: str = "stdout", attempt: int | None = None) -> str:
        """Return the output of a job so far, of its newest attempt unless you name another.

        If the job writes into files of its user (`output`), reads those; the API only gives their end.
        """
        pieces: list[str] = []
        offset = 0
        while True:
            piece = self.call("logs", job=job, attempt=attempt, stream=stream, offset=offset)
            if piece.get("file") and not self._remote:
                return _plain_file(piece["file"], 0).decode(errors="replace")
            if not piece["text"]:
                return "".join(pieces)
            pieces.append(piece["text"])
            attempt, offset = piece["attempt"], piece["offset"]

    def follow(self, job: int | str, stream: str = "stdout", attempt: int | None = None) -> Iterator[str]:
        """Yield the output of a job as it grows, until the job is over; of all attempts, unless you name one."""
        shown, offset = attempt, 0
        last = int(self.ping()["last_event"])
        while True:
            piece = self.call("logs", job=job, attempt=shown, stream=stream, offset=offset)
            if piece.get("file") and not self._remote:
                yield from self._follow_file(job, stream, attempt)
                return
            if piece["text"]:
                yield piece["text"]
            shown, offset = piece["attempt"], piece["offset"]
            if not piece["over"]:
                if not piece["text"]:
                    last = self._wait_for_event(last, _LOG_WAIT)
                continue
            if attempt is not None:
                return
            newest = self.call("logs", job=job, stream=stream)
            if newest["attempt"] != shown:
                shown, offset = newest["attempt"], 0  # each attempt has its own file
            elif newest["over"] or newest["offset"] <= offset:
                if self.status(job)["ended"]:
                    return
                last = self._wait_for_event(last, _LOG_WAIT)

    def _follow_file(self, job: int | str, stream: str, attempt: int | None) -> Iterator[str]:
        """Follow the user's own output file; attempts may have different ones."""
        file, offset, last = "", 0, int(self.ping()["last_event"])
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while True:
            over = bool(self.status(job)["ended"])  # asked before the file is read, so nothing is missed
            now = self.call("logs", job=job, attempt=attempt, stream=stream)["file"]
            if now != file:
                file, offset = now, 0
            data = _plain_file(file, offset, missing_is_empty=not over)
            if data:
                offset += len(data)
                yield decoder.decode(data)
            elif over:
                return
            else:
                last = self._wait_for_event(last, _LOG_WAIT)

    def wait(self, job: int | str, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the end of a job and return it. Raises `TimeoutError` after `timeout` seconds."""
        return _only(job, self.wait_all([job], timeout))

    def wait_all(self, jobs: Sequence[int | str], timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait for the end of all these jobs and return them. Goes on waiting while the daemon restarts."""
        deadline = _deadline(timeout)
        last, records = None, {}
        while True:
            try:
                last = int(self.ping()["last_event"]) if last is None else last
                began = time.monotonic()
                records = {one["id"]: one for job in jobs for one in self.jobs(job)}
                if all(one["state"] in _OVER for one in records.values()):
                    return list(records.values())
                rest = _REST * (time.monotonic() - began)  # with thousands of jobs, ends come all the time
                left = deadline - time.monotonic()
                if left > 0:
                    time.sleep(min(left, rest))
                    last = self._wait_for_event(last, min(left, _EVENT_WAIT))
            except NoDaemon:
                if last is None:
                    raise
                time.sleep(0.2)
            if time.monotonic() >= deadline:
                unfinished = [one for one in records.values() if not one["ended"]]
                late = ", ".join(f"job {reference(one)} is {one['state']}" for one in unfinished)
                raise TimeoutError(f"waited {timeout:g} s: {late}")

    def wait_for_estimate(self, job: int | str, timeout: float | None = None) -> dict[str, Any]:
        """Wait until the estimate of a job succeeds or fails, and return the job. Raises `TimeoutError` like `wait`."""
        deadline = _deadline(timeout)
        last = int(self.ping()["last_event"])
        while True:
            record = self.status(job)
            if record["estimating"] is None or record["state"] in _OVER:
                return record
            left = deadline - time.monotonic()
            if left <= 0:
                memory = f"the memory of job {reference(record)} {record['estimating']}"
                raise TimeoutError(f"waited {timeout:g} s: {memory}")
            last = self._wait_for_event(last, min(left, _EVENT_WAIT))

    def _wait_for_event(self, since: int, wait: float) -> int:
        return int(self.call("events", since=since, wait=wait)["last"])

    def events(self, since: int = 0, wait: float = 0.0) -> Iterator[dict[str, Any]]:
        """Yield the events after number `since`, until none comes within `wait` seconds."""
        while True:
            page = self.call("events", since=since, wait=wait)
            if not page["events"]:
                return
            yield from page["events"]
            since = int(page["last"])

    def cancel(self, *jobs: int | str) -> list[dict[str, Any]]:
        """Take jobs out of the queue, or stop them if they run."""
        return list(self.call("cancel", jobs=list(jobs)))

    def hold(self, *jobs: int | str) -> list[dict[str, Any]]:
        """Keep waiting jobs from starting."""
        return list(self.call("hold", jobs=list(jobs)))

    def release(self, *jobs: int | str) -> list[dict[str, Any]]:
        """Let held jobs start."""
        return list(self.call("release", jobs=list(jobs)))

    def edit(self, *jobs: int | str, **changes: Any) -> list[dict[str, Any]]:
        """Change waiting jobs, by the names of a job file: `edit(17, priority=5, time_limit=None)`."""
        return list(self.call("edit", jobs=list(jobs), changes=changes))

    def requeue(
        self, *jobs: int | str, hold: bool = False, env: Mapping[str, str] | None = None, memory: int | None = None
    ) -> list[dict[str, Any]]:
        """Requeue running or finished jobs under the same numbers.

        A job whose environment is no longer stored gets `env`: by default that of this process, and through the API
        none. With `memory` (bytes on each GPU), finished jobs request that much from now on;
        `status(job)["more_memory"]` proposes how much.
        """
        variables = dict(os.environ) if env is None and not self._remote else env
        return list(self.call("requeue", jobs=list(jobs), hold=hold, env=variables and dict(variables), memory=memory))

    def gpus(self) -> list[dict[str, Any]]:
        """Return the GPUs as they are now."""
        return list(self.call("gpus"))

    def drain(
        self,
        gpu: int | str,
        reason: str = "",
        begin: float | None = None,
        until: float | None = None,
        allow: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Keep new jobs off a GPU, except those of some users and groups (`@NAME`); for operators. Running jobs go on.

        Times are in seconds since 1970; by default, the drain lasts from now until you resume the GPU.
        """
        return dict(self.call("drain", gpu=gpu, reason=reason, begin=begin, until=until, allow=list(allow)))

    def resume(self, gpu: int | str, later: bool = False) -> dict[str, Any]:
        """Let a drained GPU take new jobs again; with `later`, also remove its future drains."""
        return dict(self.call("resume", gpu=gpu, later=later))

    def report(
        self,
        by: Sequence[str] = ("user", "day"),
        since: float | None = None,
        until: float | None = None,
        user: str | None = None,
    ) -> dict[str, Any]:
        """Return the resources that jobs used between two times (seconds since 1970; by default the last seven days):
        GPU hours, memory, energy, waiting and failures, in rows by user, day, name and gpu."""
        return dict(self.call("report", by=list(by), since=since, until=until, user=user))

    def trace(
        self, since: float | None = None, until: float | None = None, user: str | None = None, there: bool = False
    ) -> dict[str, Any]:
        """Return the jobs submitted between two times (seconds since 1970; by default the last seven days), with all
        that a simulation needs to run them again (`ullage.manager.simulation.history.trace_of_history`). With `there`,
        also earlier jobs that had not finished."""
        return dict(self.call("trace", since=since, until=until, user=user, there=there))

    def tokens(self, everybody: bool = False) -> list[dict[str, Any]]:
        """List your tokens for the HTTP API, or those of all users, without the tokens themselves."""
        return list(self.call("tokens", everybody=everybody))

    def token_create(
        self, name: str = "", scope: str = "submit", lasts: float | None = None, user: str | None = None
    ) -> dict[str, Any]:
        """Make a token for the HTTP API. The answer has it under `token`; it is never shown again."""
        return dict(self.call("token_create", name=name, scope=scope, lasts=lasts, user=user))

    def token_revoke(self, token: int) -> dict[str, Any]:
        """Revoke a token, by its number."""
        return dict(self.call("token_revoke", token=token))

    def ping(self) -> dict[str, Any]:
        """Return the daemon's version, its policy, and its numbers of GPUs and jobs."""
        return dict(self.call("ping"))

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        self._transport.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _deadline(timeout: float | None) -> float:
    return math.inf if timeout is None else time.monotonic() + timeout


def _only(job: int | str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(records) != 1:
        raise InvalidValue(f"{job} must name one job, got {len(records)}")
    return records[0]


def _plain_file(path: str, offset: int, missing_is_empty: bool = False) -> bytes:
    """Read a regular file from a byte offset on, with the rights of this process."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return b""
            file.seek(offset)
            return file.read()
    except OSError as error:
        if missing_is_empty and isinstance(error, FileNotFoundError):
            return b""
        raise InvalidValue(f"the job's output is in {path}, which cannot be read: {error.strerror}") from None
