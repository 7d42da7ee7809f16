"""Notifies of the ends of jobs, at least once: a notification is stored with the end, and repeated with the same id
after a crash."""

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ullage.errors import InvalidValue, UllageError
from ullage.jobs.job_files import JobSpec
from ullage.manager.core.context import ManagerContext
from ullage.manager.fault_injection import crash_point
from ullage.manager.identity import rights
from ullage.manager.running.environment import least_environment
from ullage.manager.settings import NotifySettings
from ullage.manager.storage.job_store import EndNote
from ullage.manager.storage.records import JobRecord, Notification
from ullage.sandbox.environment import environment
from ullage.sandbox.limits import Limits
from ullage.sandbox.parent import run
from ullage.units import GIB

_AT_ONCE = 4
_LOOK = 5.0  # seconds between two checks, in case the disk was full

Commit = Callable[[Callable[[], Any]], Awaitable[Any]]


def check_notifications(spec: JobSpec, settings: NotifySettings) -> None:
    """Refuse a job with an end command if the site allows none."""
    if spec.on_end is not None and not settings.commands:
        raise InvalidValue("cannot run a command at a job's end: this site runs none (notify.commands in the settings)")


def facts_of(job: JobRecord) -> dict[str, Any]:
    return {
        "job": job.id,
        "name": job.name,
        "user": job.user,
        "array": job.array_id,
        "index": job.array_index,
        "state": job.state.value,
        "cause": None if job.cause is None else str(job.cause),
        "exit_code": job.exit_code,
        "submitted": job.submitted,
        "started": job.started,
        "ended": job.ended,
        "ran": job.ran,
    }


class Notifier:
    """Delivers notifications in threads, a few at a time, users in turn."""

    def __init__(self, context: ManagerContext, commit: Commit) -> None:
        self._context, self._settings, self._commit = context, context.settings.notify, commit
        self._woken = asyncio.Event()
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._busy: dict[tuple[int, str], asyncio.Task[None]] = {}  # deliveries in progress, by user and kind
        # Of deliveries not yet removed from the database: if the disk is full, they are not repeated.
        self._results: dict[int, DeliveryResult] = {}

    def of_end(self, job: JobRecord) -> Iterator[EndNote]:
        """Yield the notifications of a job's end, for the transaction that ends it."""
        targets: list[tuple[str, dict[str, Any]]] = []
        if self._settings.hook is not None:
            targets.append(("hook", {}))
        if job.option("on_end"):
            targets.append(("command", {"command": job.option("on_end"), "cwd": job.option("cwd")}))
        if targets:
            self._context.store.afterwards(self._woken.set)
        facts = facts_of(job)
        yield from ((kind, target, facts) for kind, target in targets)

    async def run(self) -> None:
        while True:
            self._woken.clear()
            try:
                due = await asyncio.to_thread(self._context.store.history.notifications)
            except Exception as error:  # the daemon's step reports problems with the disk
                due = {}
                if not isinstance(error, UllageError):
                    self._context.say(f"notifications cannot be read: {type(error).__name__}: {error}")
            for group, notifications in due.items():
                if group not in self._busy:
                    task = self._busy[group] = asyncio.create_task(self._tell(notifications))
                    task.add_done_callback(partial(self._free, group))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _LOOK)

    def _free(self, group: tuple[int, str], task: asyncio.Task[None]) -> None:
        self._busy.pop(group, None)
        if task.cancelled():
            return
        if task.exception() is None:
            self._woken.set()
        else:
            self._context.say(f"a notification could not be stored: {task.exception()}")

    async def _tell(self, notifications: list[Notification]) -> None:
        for each in notifications:
            if each.id not in self._results:
                async with self._places:
                    crash_point("notify-before-delivery")
                    self._results[each.id] = await _in_thread(partial(self._deliver, each))
                    crash_point("notify-delivered")
            await self._commit(partial(self._settle, each, self._results[each.id]))
            del self._results[each.id]

    def _deliver(self, each: Notification) -> "DeliveryResult":
        try:
            settings, facts = self._settings, {"id": f"{each.job}-{each.id}", **each.facts}
            if each.kind == "command":
                env, given = least_environment(each.uid), rights(each.uid, each.gid)
                command, cwd = each.target["command"], each.target["cwd"]
                return by_command(command, facts, env, cwd, given, settings.command_timeout)
            if settings.hook is None:
                return DeliveryResult(False, "this site has no hook any more")
            return by_command(settings.hook, facts, least_environment(os.getuid()), None, {}, settings.hook_timeout)
        except Exception as error:  # whatever went wrong, the other notifications must go out
            return DeliveryResult(False, f"{type(error).__name__}: {error}")

    def _settle(self, each: Notification, result: "DeliveryResult") -> None:
        kind = "notified" if result.done else "not notified"
        self._context.store.settle_notification(each, kind, f"{each.kind}: {result.text}")


async def _in_thread(work: "Callable[[], DeliveryResult]") -> "DeliveryResult":
    """Run a function in a daemon thread. If the end of the daemon cuts off a delivery, the next daemon repeats it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[DeliveryResult] = loop.create_future()

    def hear(result: DeliveryResult) -> None:
        if not answer.done():
            answer.set_result(result)

    def call() -> None:
        result = work()
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(hear, result)

    threading.Thread(target=call, daemon=True, name="notify").start()
    return await answer


_COMMAND = "ullage.sandbox.child:run_command"


class DeliveryResult(NamedTuple):
    """Whether a notification was delivered, and details."""

    done: bool
    text: str


def by_command(
    command: Sequence[str],
    facts: Mapping[str, Any],
    env: Mapping[str, str],
    cwd: str | None,
    rights: Mapping[str, int | str],
    seconds: float,
) -> DeliveryResult:
    """Run a command once, whatever its result."""
    request = {"command": list(command), "text": json.dumps(facts), "env": dict(env) | variables(facts)}
    limits = Limits(seconds=seconds, memory=4 * GIB, processes=256)
    outcome = run(_COMMAND, request, limits=limits, env=environment(env), cwd=cwd, rights=rights or None)
    if outcome.answer is None:
        return DeliveryResult(False, f"{command[0]}: {'' if outcome.reason == 'error' else 'it '}{outcome.failure}")
    if "failed" in outcome.answer:
        return DeliveryResult(False, outcome.answer["failed"])
    return DeliveryResult(True, f"{command[0]}: exit code {outcome.answer['code']}")


def variables(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts as environment variables; unknown ones are empty."""
    return {f"ULLAGE_END_{name.upper()}": "" if value is None else str(value) for name, value in facts.items()}
