"""The daemon: one process, one event loop, one writer. It waits for orders, ends and readings, and then takes a step.

A step observes folders of attempts and readings, records changes, and starts jobs. An interrupted step is repeated.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.errors import DiskFull, NoGPUSource, NotAllowed, StoreDamaged, UllageError
from ullage.manager.api.app import App
from ullage.manager.api.gate import Gate
from ullage.manager.api.server import Remote, Server
from ullage.manager.core.attempts import AttemptTracker, RunningJobGuard
from ullage.manager.core.context import ManagerContext, ServiceState, SlotReader
from ullage.manager.core.export import site
from ullage.manager.core.intake import NOBODY, Intake
from ullage.manager.core.limits import host_of
from ullage.manager.core.locks import lock_gpus, lock_home
from ullage.manager.core.notifications import Notifier
from ullage.manager.core.orders import Orders
from ullage.manager.core.questions import Questions
from ullage.manager.core.scheduler import Scheduler
from ullage.manager.core.watchdog import CrashMarker, Watchdog
from ullage.manager.identity import Caller, Tokens, this_user
from ullage.manager.monitor.readings import Source
from ullage.manager.monitor.sampling import Monitor
from ullage.manager.monitor.sources import best_source
from ullage.manager.placement import Ledger
from ullage.manager.policy_files import load_policy
from ullage.manager.running.cgroups import Cgroups
from ullage.manager.running.launcher import Launcher
from ullage.manager.running.mps import Mps, TimeSlicing
from ullage.manager.settings import ManagerSettings
from ullage.manager.storage.database import Database
from ullage.manager.storage.group_commit import GroupCommit
from ullage.manager.storage.job_store import JobStore
from ullage.manager.storage.records import AttemptRecord, JobRecord
from ullage.manager.storage.tokens import TokenStore
from ullage.manager.transport import reachable, socket_file
from ullage.manager.verbs import SCOPES, VERBS

if TYPE_CHECKING:
    from ullage.manager.running.page_process import PageProcess

TICK = 1.0  # longest time between two steps, in seconds
_REST, _LONGEST_REST = 9.0, 3.0  # rest after a step: times its processor time, at most seconds
_SWITCH = 0.001  # seconds that another thread may keep the event loop waiting
_CARE_EVERY = 6 * 3600.0
_CURVES_EVERY = 5.0  # a kill loses at most these seconds of memory over time, or one step if that is longer
CARDS = "serve"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


class Daemon:
    """The daemon of a home. `run` serves until a signal or an order ends it; jobs go on without it.

    asyncio.run(Daemon(home(), read_settings(None), Monitor(best_source())).run())
    """

    def __init__(
        self,
        folder: Path,
        settings: ManagerSettings,
        monitor: Monitor,
        *,
        cards: Path | None = None,
        clock: Callable[[], float] = time.time,
        say: Callable[[str], None] = lambda text: None,
        new: bool = False,
        gpu_locks: Sequence[int] = (),
    ) -> None:
        policy = load_policy(settings.policy, guarded=True)
        self._run = folder / "run"
        folder = folder / "manager"
        for place in (folder, self._run):
            place.mkdir(parents=True, exist_ok=True, mode=0o755)
        self._locks = [lock_home(folder), *gpu_locks]
        self.database = Database(folder, new, say)
        sharing = Mps(self._run, say) if settings.sharing == "mps" else TimeSlicing()
        self.context = ManagerContext(
            folder=folder,
            settings=settings,
            policy=policy,
            store=JobStore(self.database, clock),
            clock=clock,
            say=say,
            cards=cards,
            launcher=Launcher(folder, self._run / "wake.sock"),
            slot_reader=SlotReader(monitor, settings.placing.busy_window),
            sharing=sharing,
            ledger=Ledger(host=host_of(settings.host)),
            service=ServiceState(began=clock()),
            handled=CrashMarker(folder),
        )
        cgroups = Cgroups(wanted=settings.running.cgroup)
        self.attempts = AttemptTracker(self.context)
        self.intake = Intake(self.context)
        self.scheduler = Scheduler(self.context, cgroups, self.intake.awaits_estimate)
        self.guard = RunningJobGuard(self.context, self.attempts, self.scheduler.makes_room)
        self._monitor, self._watchdog = monitor, Watchdog()
        self._group_commit = GroupCommit(self.context.store)
        self.notifier = Notifier(self.context, self._group_commit.do)
        self.context.store.on_end = self.notifier.of_end
        self._readers = ThreadPoolExecutor(4, "reader")  # they make long answers
        self._next_care = 0.0
        self._next_curves = time.monotonic() + _CURVES_EVERY
        self._fatal: StoreDamaged | None = None  # the reason to end
        self._loop: asyncio.AbstractEventLoop | None = None  # while it serves
        self._news = asyncio.Condition()
        self._wake_socket: socket.socket | None = None  # while it listens to supervisors
        self.tokens = TokenStore(self.database, self.context.store, clock)
        self.questions = Questions(self.context, self.intake, self.database)
        self.api = self._make_api()
        self.page = self._make_page()
        api = None if self.api is None else (self.api.url, self.api.tokens.own())
        self.orders = Orders(
            self.context, self.intake, self.attempts, self.scheduler, cgroups, self.tokens, self.questions, api
        )

    def _make_api(self) -> Remote | None:
        settings, rules = self.context.settings, self.context.settings.access
        listen = settings.api.listen
        if listen is None and settings.page.listen is not None:
            listen = "0"  # the page uses the API; any free local port will do
        if listen is None:
            return None
        tokens = Tokens(self.context.folder, rules.operators, self.tokens.find)
        return Remote(listen, self._run, tokens, self.context.say)

    def _make_page(self) -> "PageProcess | None":
        settings = self.context.settings.page
        if settings.listen is None or self.api is None:
            return None
        from ullage.manager.running.page_process import PageProcess

        async def order(verb: str, arguments: dict[str, Any]) -> Any:
            return await self.call(this_user(), verb, arguments)

        return PageProcess(settings, settings.listen, self.api.url, self._run, order, self.context.say)

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `end` is called or a signal arrives."""
        self._loop = loop = asyncio.get_running_loop()
        sys.setswitchinterval(_SWITCH)
        self.context.store.on_change = self._tell_news
        service = self.context.service
        # A killed supervisor cannot send a message, but it is a child of this process.
        for number, do in ((signal.SIGTERM, service.end), (signal.SIGINT, service.end), (signal.SIGCHLD, service.wake)):
            with contextlib.suppress(ValueError, NotImplementedError, RuntimeError):  # not in a test's thread
                loop.add_signal_handler(number, do)
        self._monitor.start()
        beside: list[asyncio.Task[None]] = []
        settings, service, say = self.context.settings, self.context.service, self.context.say
        each = settings.limits.connections
        app = App(self.call, service.ending.is_set, say)
        whose = self.api.tokens.caller if self.api is not None else lambda token: None
        gate = Gate(app, whose, each, service.health)
        server = Server(gate, socket_file(self._run.parent), self.api, settings.access, each, say)
        try:
            self.context.sharing.start()
            self.context.look()
            with contextlib.suppress(DiskFull):
                self.context.store.keep_site(site(self.context))
            self._listen_for_ends(loop)
            skipped = self.context.store.skip_numbers(max(self.context.launcher.jobs(), default=0))
            if skipped:
                self.context.say(
                    f"the database does not know the last {skipped} jobs, whose files are there: an older copy?"
                )
            for job, reason in self.context.store.history.damaged.items():
                self.context.say(f"job {job} is set aside, since it cannot be read: {reason}")
            self.attempts.count_crash(self.context.handled.left())
            adopted = self.attempts.adopt()
            if adopted:
                self.context.say(f"{adopted} running jobs were adopted")
            self.intake.resume()
            self.questions.resume()
            beside.append(asyncio.create_task(self.notifier.run()))
            await server.start()
            if self.page is not None:
                beside.append(asyncio.create_task(self.page.run()))
            ready()
            self._watchdog.ready()
            await self._steps(server)
            if self._fatal is not None:
                raise self._fatal
        finally:
            for task in beside:
                task.cancel()
            self._watchdog.ending()
            self._tell_news()  # answer the requests that wait for news
            await server.stop()
            await asyncio.gather(*beside, return_exceptions=True)
            await self.intake.estimates.close()
            await self._group_commit.close()
            self._readers.shutdown()
            self._finish(loop)

    async def _steps(self, server: Server) -> None:
        service = self.context.service
        ending = asyncio.ensure_future(service.ending.wait())
        while not service.ending.is_set():
            service.woken.clear()
            await server.keep_listening()
            if self._loop is not None and not (self._run / "wake.sock").exists():
                self._listen_for_ends(self._loop)
            worked = time.process_time()
            placed = await self.step()
            service.stepped = time.monotonic()
            rest = time.monotonic() + min(_REST * (time.process_time() - worked), _LONGEST_REST)
            for job, attempt in placed:
                self._start(job, attempt)
                await asyncio.sleep(0)  # orders are answered between two starts
            if self.context.sharing.watched:
                await asyncio.to_thread(self.context.sharing.watch)
            waking = asyncio.ensure_future(service.woken.wait())
            await asyncio.wait({waking, ending}, timeout=TICK, return_when=asyncio.FIRST_COMPLETED)
            waking.cancel()
            with contextlib.suppress(TimeoutError):  # meanwhile orders are answered, several at once
                await asyncio.wait_for(asyncio.shield(ending), max(0.0, rest - time.monotonic()))
        ending.cancel()

    async def step(self) -> list[tuple[JobRecord, AttemptRecord]]:
        service = self.context.service
        before, service.trouble, service.disk_full = service.trouble, None, False
        try:
            async with self.context.store.turn:
                self.attempts.follow()
                self.context.look()
                self.guard.look()
            await self.intake.follow(self._group_commit.do)
            if time.monotonic() > self._next_curves:
                self._next_curves = time.monotonic() + _CURVES_EVERY
                with contextlib.suppress(DiskFull):
                    await self._group_commit.do(self.context.keep_curves)
            if time.monotonic() > self._next_care:
                self._next_care = time.monotonic() + _CARE_EVERY
                await self._care()
            placed = await self.scheduler.place()
            self._watchdog.well()
            return placed
        except StoreDamaged:
            raise
        except Exception as error:  # orders are still answered, and the next step may succeed
            known, service.disk_full = isinstance(error, UllageError), isinstance(error, DiskFull)
            service.trouble = str(error) if known else f"a step failed: {type(error).__name__}: {error}"
            if known:
                self._watchdog.well()  # the obstacle is known, and a restarted daemon would meet it too
            if service.trouble != before:
                self.context.say(service.trouble if known else f"{service.trouble}\n{traceback.format_exc()}")
            return []

    def _start(self, job: JobRecord, attempt: AttemptRecord) -> None:
        try:
            with self.context.handled.now(job.id):
                self.scheduler.start(job, attempt)
        except Exception as error:  # the next pass finds no process for its folder and ends the attempt
            self.context.say(f"job {job.reference} could not be started: {type(error).__name__}: {error}")

    async def _care(self) -> None:
        async with self.context.store.turn:
            await asyncio.to_thread(self.database.back_up)
        days = self.context.settings.running.keep_days
        if days is not None:
            old = await self._group_commit.do(partial(self.context.store.forget, self.context.clock() - days * 86400.0))
            for job in self.context.launcher.jobs().intersection(old):
                self.context.launcher.remove(job)

    async def call(self, caller: Caller, verb: str, arguments: dict[str, Any], wait: float = 0.0) -> Any:
        """Run an order with checked arguments in the loop's thread. `events` and `estimated` may wait for news."""
        scope, how = VERBS[verb].scope, VERBS[verb].how
        if SCOPES.index(caller.scope) < SCOPES.index(scope):
            raise NotAllowed(f"this token allows to {caller.scope}; {verb!r} needs one with the scope {scope}")
        if wait > 0:
            await self._wait_for_news(verb, arguments, wait)
        order = partial(getattr(self.orders, verb), caller, **arguments)
        try:
            if how == "changes":
                return await self._group_commit.do(order)
            if how == "long":
                return await asyncio.get_running_loop().run_in_executor(self._readers, order)
            return order()
        except StoreDamaged as error:
            self._fatal = error
            self.context.service.end()
            raise

    async def _wait_for_news(self, verb: str, arguments: dict[str, Any], wait: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait), self._news:
                if verb == "events" and self.context.store.last_event <= arguments["since"]:
                    await self._news.wait()
                elif verb == "estimated":
                    ending, is_open = self.context.service.ending, self.questions.is_open
                    await self._news.wait_for(lambda: ending.is_set() or not is_open(arguments["estimate"]))

    def _tell_news(self) -> None:
        async def tell() -> None:
            async with self._news:
                self._news.notify_all()

        asyncio.get_running_loop().create_task(tell())

    def _listen_for_ends(self, loop: asyncio.AbstractEventLoop) -> None:
        file = self._run / "wake.sock"
        with contextlib.suppress(FileNotFoundError):
            file.unlink()
        self._stop_listening(loop)
        self._wake_socket = listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listening.bind(reachable(file))
        os.chmod(file, 0o600)
        listening.setblocking(False)
        loop.add_reader(listening, self._on_wake_word, listening)

    def _on_wake_word(self, listening: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                listening.recv(256)
                self.context.service.wake()

    def _stop_listening(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._wake_socket is not None:
            loop.remove_reader(self._wake_socket)
            self._wake_socket.close()
            self._wake_socket = None

    def _finish(self, loop: asyncio.AbstractEventLoop) -> None:
        self._stop_listening(loop)
        left = len(self.context.store.attempts)
        if left:
            self.context.say(f"{left} jobs go on without this daemon; the next `ullage serve` adopts them")
        else:
            self.context.sharing.stop()
        self._monitor.stop()
        with contextlib.suppress(UllageError):
            for attempt in self.context.store.attempts.values():
                self.context.keep_curve(attempt)
        self.database.close()
        self.context.handled.close()
        for lock in self._locks:
            os.close(lock)


@contextlib.contextmanager
def usable_home(folder: Path) -> Iterator[None]:
    """Turn the failure to write any file of a home into one clear message.

    >>> with usable_home(Path("/dev/null")):
    ...     Path("/dev/null/manager").mkdir()
    Traceback (most recent call last):
    ullage.errors.NotAllowed: nothing was started: /dev/null/manager cannot be written (Not a directory); \
ULLAGE_HOME names another folder to keep everything in
    """
    try:
        yield
    except UllageError:
        raise
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise DiskFull(
                f"nothing was started: there is no room in {folder} ({error.strerror}). "
                "Make room on that disk and try again; running jobs go on meanwhile"
            ) from error
        if error.errno in _NOT_OURS:
            raise NotAllowed(
                f"nothing was started: {error.filename or folder} cannot be written ({error.strerror}); "
                "ULLAGE_HOME names another folder to keep everything in"
            ) from error
        raise


def make_daemon(
    folder: Path,
    settings: ManagerSettings,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.time,
    new: bool = False,
) -> Daemon:
    """Make the daemon of a home. Problems with the settings or the machine raise one clear error."""
    from ullage.estimation.estimators.registry import estimators, find

    for name in (settings.estimating.estimator, settings.estimating.activity or NOBODY):
        if name not in (NOBODY, *estimators()):  # known ones are not loaded here, since that would import PyTorch
            find(name)
    cards = None if settings.virtual is None else folder / "cards" / CARDS
    source = find_source(settings, cards)
    monitor = Monitor(source, settings.monitoring.interval, settings.monitoring.window)
    locks = [] if cards is not None else lock_gpus([device.id for device in source.devices()], say)
    try:
        return Daemon(folder, settings, monitor, cards=cards, say=say, clock=clock, new=new, gpu_locks=locks)
    except BaseException:
        for lock in locks:
            os.close(lock)
        raise


def find_source(settings: ManagerSettings, cards: Path | None) -> Source:
    if cards is not None and settings.virtual is not None:
        from ullage.virtual.shared_card.cards import Cards

        Cards.create(cards, settings.virtual)
        return best_source(cards)
    try:
        return best_source()
    except NoGPUSource as error:
        reason = str(error).partition(". Virtual")[0]
        raise NoGPUSource(f"{reason}; to serve virtual GPUs type: ullage serve --virtual 4xA100-40GB") from None
