"""The daemon: one process, one event loop, one writer. It waits for orders, ends and readings, and then takes a step.

A step looks at what is true (folders of attempts, readings of the monitor), writes down what has changed, and starts
what may start. A step can be repeated at any time, so an interrupted one is simply taken again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ullage
from ullage.errors import AlreadyServing, StoreDamaged, StoreFull, UllageError, UnknownName
from ullage.manager.api.socket import SocketServer
from ullage.manager.client import reachable, socket_file
from ullage.manager.core.attempts import Attempts, Guarding
from ullage.manager.core.intake import Intake
from ullage.manager.core.orders import Orders, arguments_of
from ullage.manager.core.readings import Watching
from ullage.manager.core.scheduling import Scheduling
from ullage.manager.core.site import Site
from ullage.manager.identity import Who, myself
from ullage.manager.running.cgroups import Cgroups
from ullage.manager.running.launcher import Launcher
from ullage.manager.running.sharing import sharing_of
from ullage.manager.settings import Settings, checked
from ullage.manager.storage.book import Book, Together
from ullage.manager.storage.records import AttemptRecord, JobRecord
from ullage.manager.storage.store import Store
from ullage.monitor import Monitor
from ullage.placement import Ledger

if TYPE_CHECKING:
    from ullage.manager.api.server import ApiServer

TICK = 1.0  # seconds between two steps when nothing happens
_REST = 9.0  # times as long as a step took, the daemon only answers orders after it
_CARE_EVERY = 6 * 3600.0


class Daemon:
    """One daemon of one home. `run` serves until it is told to end; jobs go on without it.

    asyncio.run(Daemon(home(), read_settings(None), Monitor(best_source())).run())
    """

    def __init__(
        self, folder: Path, settings: Settings, monitor: Monitor, *, cards: Path | None = None,
        clock: Callable[[], float] = time.time, say: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self._run = folder / "run"
        folder = folder / "manager"
        for place in (folder, self._run):
            place.mkdir(parents=True, exist_ok=True, mode=0o755)
        self._lock = lock_home(folder)
        self._began = clock()
        self.store = Store(folder)
        sharing = sharing_of(settings.sharing, self._run, say)
        self.site = Site(
            folder=folder, settings=settings, book=Book(self.store, clock), clock=clock, say=say, cards=cards,
            launcher=Launcher(folder, self._run / "wake.sock"), watching=Watching(monitor), sharing=sharing,
            ledger=Ledger(),
        )  # fmt: skip
        self.cgroups = cgroups = Cgroups() if settings.running.cgroup else Cgroups(root=Path("/nonexistent"))
        self.attempts = Attempts(self.site, cgroups)
        self.guarding = Guarding(self.site, self.attempts)
        self.intake = Intake(self.site)
        self.scheduling = Scheduling(self.site, cgroups)
        self.orders = Orders(self)
        self._together = Together(self.site.book)
        self._monitor = monitor
        self._next_care = 0.0
        self.trouble: str | None = None  # what the last step could not do
        self._full = False
        self.api = self._make_api()

    def _make_api(self) -> ApiServer | None:
        listen, rules = self.site.settings.api.listen, self.site.settings.access
        if listen is None:
            return None
        from ullage.manager.api.server import ApiServer  # FastAPI takes half a second to import
        from ullage.manager.identity import Tokens

        tokens = Tokens(self.site.folder, rules.operators)
        return ApiServer(listen, self._run, tokens, myself(), self.call, self.site.say)

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `end` is called or a signal comes."""
        self._loop = asyncio.get_running_loop()
        self._woken, self._ending, self._news = asyncio.Event(), asyncio.Event(), asyncio.Condition()
        self.site.book.on_change = self._tell_news
        # A supervisor that is killed cannot send word, but it is a child of this process.
        for number, do in ((signal.SIGTERM, self.end), (signal.SIGINT, self.end), (signal.SIGCHLD, self.wake)):
            with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # not in a test's thread
                self._loop.add_signal_handler(number, do)
        self._monitor.start()
        rules = self.site.settings.access
        server = SocketServer(socket_file(self._run.parent), self.call, rules.operators, rules.group, self.site.say)
        try:
            self.site.sharing.start()
            self.site.look()
            self._listen_for_ends()
            skipped = self.site.book.skip_numbers(max(self.site.launcher.jobs(), default=0))
            if skipped:
                self.site.say(
                    f"the database does not know the last {skipped} jobs, whose files are there: an older copy?"
                )
            adopted = self.attempts.adopt()
            if adopted:
                self.site.say(f"{adopted} running jobs were adopted")
            self.intake.resume()
            await server.start()
            if self.api is not None:
                self.api.start(self._loop)
            ready()
            await self._steps()
        finally:
            await server.stop()
            if self.api is not None:
                await asyncio.to_thread(self.api.stop)
            await self.intake.estimates.close()
            self._finish()

    async def _steps(self) -> None:
        ending = asyncio.ensure_future(self._ending.wait())
        while not self._ending.is_set():
            self._woken.clear()
            began = time.monotonic()
            placed = self.step()
            rest = began + (time.monotonic() - began) * (1 + _REST)
            for job, attempt in placed:
                self._start(job, attempt)
                await asyncio.sleep(0)  # orders are answered between two starts
            if self.site.sharing.watched:
                await asyncio.to_thread(self.site.sharing.watch)
            waking = asyncio.ensure_future(self._woken.wait())
            await asyncio.wait({waking, ending}, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
            waking.cancel()
            with contextlib.suppress(TimeoutError):  # orders that come meanwhile are answered, and answered together
                await asyncio.wait_for(asyncio.shield(ending), max(0.0, rest - time.monotonic()))
        ending.cancel()

    def step(self) -> list[tuple[JobRecord, AttemptRecord]]:
        """See what is true, and write down what follows; the attempts that are to be started now."""
        self.trouble, before = None, self.trouble
        self._full = False
        try:
            self.attempts.follow()
            self.site.look()
            self.guarding.look()
            self.intake.write_answers()
            if time.monotonic() > self._next_care:
                self._next_care = time.monotonic() + _CARE_EVERY
                self._care()
            return self.scheduling.place()
        except StoreDamaged:
            raise
        except Exception as error:  # orders are still answered, and the next step may do better
            known, self._full = isinstance(error, UllageError), isinstance(error, StoreFull)
            self.trouble = str(error) if known else f"a step failed: {type(error).__name__}: {error}"
            if self.trouble != before:
                self.site.say(self.trouble if known else f"{self.trouble}\n{traceback.format_exc()}")
            return []

    def _start(self, job: JobRecord, attempt: AttemptRecord) -> None:
        try:
            self.scheduling.start(job, attempt)
        except Exception as error:  # the next look finds nobody in its folder and ends the attempt
            self.site.say(f"job {job.label} could not be started: {type(error).__name__}: {error}")

    def _care(self) -> None:
        """A copy of the database; what is older than the site wants to keep goes."""
        self.store.back_up()
        days = self.site.settings.running.keep_days
        if days is not None:
            old = self.site.book.forget(self.site.clock() - days * 86400.0)
            for job in self.site.launcher.jobs().intersection(old):
                self.site.launcher.remove(job)

    # What the socket and the API use.

    async def call(self, who: Who, verb: str, arguments: dict[str, Any], wait: float = 0.0) -> Any:
        """Do an order, in the thread of the event loop; `events` may wait for something to happen."""
        do, arguments = self._verb(verb, arguments)
        if verb == "events" and wait > 0 and self.site.book.last_event <= int(arguments.get("since") or 0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait), self._news:
                    await self._news.wait()
        if verb == "submit":
            return await self._together.do(partial(do, who, **arguments))
        return do(who, **arguments)

    def call_from_thread(self, who: Who, verb: str, arguments: dict[str, Any], wait: float = 0.0) -> Any:
        """The same, from any other thread."""
        return asyncio.run_coroutine_threadsafe(self.call(who, verb, arguments, wait), self._loop).result()

    def _verb(self, verb: str, arguments: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
        if verb not in Orders.names:
            raise UnknownName("order", verb[:80], Orders.names)
        values = checked(arguments_of(verb), arguments, verb)
        return getattr(self.orders, verb), {name: getattr(values, name) for name in type(values).model_fields}

    def wake(self) -> None:
        """Take a step soon."""
        self._woken.set()

    def end(self) -> None:
        """Stop serving; jobs go on."""
        self._ending.set()

    def about(self) -> dict[str, Any]:
        """What this daemon is."""
        settings = self.site.settings
        return {
            "version": ullage.__version__, "pid": os.getpid(), "since": self._began, "policy": settings.policy,
            "sharing": settings.sharing, "estimator": settings.estimating.estimator, "virtual": settings.virtual,
            "gpus": len(self.site.slots), "jobs": self.site.book.past.counts(), "last_event": self.site.book.last_event,
            "estimates_pending": self.intake.estimates.pending, "trouble": self.trouble, "disk_full": self._full,
        }  # fmt: skip

    def _tell_news(self) -> None:
        async def tell() -> None:
            async with self._news:
                self._news.notify_all()

        self._loop.create_task(tell())

    def _listen_for_ends(self) -> None:
        """Supervisors send a word when a job begins or ends."""
        file = self._run / "wake.sock"
        with contextlib.suppress(FileNotFoundError):
            file.unlink()
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ear.bind(reachable(file))
        os.chmod(file, 0o600)
        self._ear.setblocking(False)
        self._loop.add_reader(self._ear, self._heard)

    def _heard(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._ear.recv(256)
                self.wake()

    def _finish(self) -> None:
        with contextlib.suppress(AttributeError):
            self._loop.remove_reader(self._ear)
            self._ear.close()
        left = len(self.site.book.attempts)
        if left:
            self.site.say(f"{left} jobs go on without this daemon; the next `ullage serve` adopts them")
        else:
            self.site.sharing.stop()
        self._monitor.stop()
        self.store.close()
        os.close(self._lock)


def lock_home(folder: Path) -> int:
    """The lock that one daemon holds for as long as it lives; a second one is refused."""
    descriptor = os.open(folder / "serve.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise AlreadyServing(
            f"a daemon is running in {folder.parent} already (process {pid or 'unknown'}); "
            "`ullage queue` speaks to it, and another one needs another ULLAGE_HOME"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
