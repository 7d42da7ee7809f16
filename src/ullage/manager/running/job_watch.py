"""Waits for a job, and signals it in time to save a checkpoint and to end. Uses only the standard library."""

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from ullage.manager.running.process_tree import listeners, signal_in, written
from ullage.sandbox.process_identity import descendants

_BETWEEN_SAMPLES = 1.0  # seconds between two checks of the bytes that a job writes after a request for a checkpoint
_SAVING = 1 << 20  # bytes between two checks that are more than log lines
_STILL_SAVING = 5.0  # seconds after its last such write during which a job may still be saving
LOOK = 5.0  # seconds after which to look for a stop order without a signal
WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)  # blocked in this process
_Step = tuple[float, signal.Signals | None, str | None]  # time, signal (None: request a checkpoint), reason


class JobWatch:
    """Waits for the job, and sends the signals of its limits or of a stop order.

    A request for a checkpoint goes to the process that the job named, or to the outermost ones that handle the signal,
    until one gets it. While the job then writes, its end is postponed.
    """

    def __init__(
        self,
        order: dict[str, Any],
        child: int,
        began: float,
        stop_order: Callable[[], dict[str, Any] | None],
        named: Callable[[], int | None],
    ) -> None:
        self.child, self._stop_order, self._named = child, stop_order, named
        self.reason: str | None = None
        self.sent: list[str] = []
        self.checkpoint_asked = self.checkpoint_unheard = self.leader_asked = False
        self.extended = 0.0
        self._end_signals: list[signal.Signals] = []  # signals sent to end it
        self._over: tuple[int, Any] | None = None  # how the first process ended
        self._grace = float(order.get("grace", 30.0))
        self._interactive = bool(order.get("interactive"))
        self._longest_extension = float(order.get("checkpoint_extension", 0.0))
        self._checkpoint = getattr(signal, f"SIG{order.get('checkpoint_signal') or 'USR1'}")
        self._plan: list[_Step] = []
        self._stop: dict[str, Any] | None = None
        self._written, self._wrote_at, self._next_sample = 0, -math.inf, 0.0
        limit = order.get("time_limit")
        if limit is not None:
            end = began + float(limit)
            if order.get("checkpoint_lead") is not None:
                self._plan.append((end - float(order["checkpoint_lead"]), None, None))
            self._plan += self._ending(end, "time-limit")

    def wait(self) -> tuple[int, Any]:
        while not self._is_over():
            self._act()
            longest = _BETWEEN_SAMPLES if self._over or self.checkpoint_asked else LOOK
            pause = min([longest, *(when - time.monotonic() for when, _, _ in self._plan[:1])])
            info = signal.sigtimedwait(WATCHED, max(pause, 0.0))
            if info is not None and info.si_signo in (signal.SIGTERM, signal.SIGINT):
                self._follow({"reason": "supervisor-stopped", "grace": self._grace})
        assert self._over is not None
        return self._over

    def _is_over(self) -> bool:
        """Whether the first process has ended and, after an order to end, also all others."""
        try:
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self.child:
                    self._over = status, usage
                    if self._end_signals:
                        for left in (tree := descendants(os.getpid())):
                            signal_in(tree, left, signal.SIGTERM)  # processes in another session did not get the signal
        except ChildProcessError:
            return True
        return self._over is not None and (not self._end_signals or signal.SIGKILL in self._end_signals)

    def _act(self) -> None:
        stop = self._stop_order()
        if stop is not None and stop != self._stop:
            self._stop = stop
            self._follow(stop)
        if self.checkpoint_asked:
            self._sample()
        while self._plan and self._plan[0][0] <= time.monotonic():
            if self.checkpoint_asked and self._put_off():
                return
            _, number, reason = self._plan.pop(0)
            self.reason = reason or self.reason
            if number is None:
                self._ask_for_checkpoint()
            else:
                self._tell(number)

    def _tell(self, number: signal.Signals) -> None:
        self._end_signals.append(number)
        self.sent.append(number.name)
        try:
            os.killpg(self.child, number)
            if self._interactive and number == signal.SIGTERM:
                os.killpg(self.child, signal.SIGHUP)  # an interactive shell ignores SIGTERM
        except ProcessLookupError:  # it has no session yet, or only other processes are left
            if self._over is None:
                os.kill(self.child, number)

    def _ask_for_checkpoint(self) -> None:
        tree = descendants(os.getpid())
        named = self._named()
        processes = [named] if named in tree else listeners(tree, self._checkpoint)
        heard = [pid for pid in processes if signal_in(tree, pid, self._checkpoint)]
        self.checkpoint_asked, self.checkpoint_unheard = bool(heard), not heard
        if heard:
            self.leader_asked = self.child in heard
            self.sent.append(self._checkpoint.name)
            self._written = written(tree)
        elif time.monotonic() + _BETWEEN_SAMPLES < self._plan[0][0]:
            self._plan.insert(0, (time.monotonic() + _BETWEEN_SAMPLES, None, self.reason))

    def _sample(self) -> None:
        now = time.monotonic()
        if now >= self._next_sample:
            before, self._written = self._written, written(descendants(os.getpid()))
            self._next_sample = now + _BETWEEN_SAMPLES
            if self._written - before >= _SAVING:
                self._wrote_at = now

    def _put_off(self) -> bool:
        """Postpone the end of a job that is still writing; return false if it is not, or had its full extension."""
        saving = time.monotonic() - self._wrote_at < _STILL_SAVING
        if not saving or self.extended >= self._longest_extension or self._plan[0][2] not in ("slot-end", "time-limit"):
            return False
        more = min(_STILL_SAVING, self._longest_extension - self.extended)
        self.extended += more
        self._plan = [(when + more, number, reason) for when, number, reason in self._plan]
        return True

    def _follow(self, stop: dict[str, Any]) -> None:
        now, lead = time.monotonic(), stop.get("checkpoint")
        self._grace = float(stop.get("grace", self._grace))
        self.reason = str(stop["reason"])
        ending = self._ending(now + float(lead or 0.0), self.reason)
        self._plan = ([(now, None, self.reason)] if lead is not None else []) + ending

    def _ending(self, when: float, reason: str) -> list[_Step]:
        return [(when, signal.SIGTERM, reason), (when + self._grace, signal.SIGKILL, reason)]
