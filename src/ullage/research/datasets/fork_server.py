"""Runs orders in fresh processes, forked from one parent that has everything imported.

Importing PyTorch takes seconds, a run a fraction of one. The parent imports, and never touches CUDA: a forked child
then makes a context of its own as any fresh process does. A child prepares (model, context), says so, and waits for
leave to run, which it gets when the card has room for it; so much is promised only while it trains. The parent has
one thread, as forking asks for, and looks after all children in one loop.

In turns (`Trade.turns`), children that have leave come to a point where they pause; when all of them are there, they go
on one after the other, each while the others stand still. They end together, when the last one is done.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Order = dict[str, Any]
Answer = dict[str, Any]
LOOK_AHEAD = 64  # of the children that wait, one that fits goes before one that does not; never more than so many


@dataclass(frozen=True, kw_only=True)
class Trade:
    """What children do, and what they take.

    `prepare(order)` makes whatever the run needs; `run(prepared, pause)` gives the answer, and calls `pause()` once
    where it is to wait for its turn, if children take turns (`turns` is how many at most together; 0: they do not).
    `needs(order)` is the memory that a run may take; `base` what a child takes before it runs; `host(order)` the
    machine's own memory that a child may take. `log(order)` is a file for a child's output.
    """

    prepare: Callable[[Order], Any]
    run: Callable[[Any, Callable[[], None]], Answer]
    needs: Callable[[Order], int]
    base: int = 0
    turns: int = 0
    host: Callable[[Order], int] = lambda order: 0
    log: Callable[[Order], Path | None] = lambda order: None


@dataclass
class _Child:
    order: Order
    pid: int
    answers: int  # file descriptor: what the child writes
    leave: int  # file descriptor: closed without a word, or one byte: go
    since: float
    state: str = "preparing"  # then "ready", "running", with turns "paused", "reading", "answered", at last "ended"
    taken: int = 0
    company: bool = False  # others ran at the same time
    text: bytearray = field(default_factory=bytearray)
    killed: bool = False


class ForkServer:
    """Children at work: at most `at_once`, their needs together at most `total`.

    `for order, answer in server.work(orders)` gives each as it ends. A run that did not end well while others ran is
    tried again alone, once, after all the others; `retry(answer)` says which answers are such.
    """

    def __init__(
        self, trade: Trade, *, total: int, at_once: int, timeout: float, host_total: int | None = None,
        retry: Callable[[Answer], bool] = lambda answer: "failed" in answer,
    ) -> None:  # fmt: skip
        self.trade, self.total, self.at_once, self.timeout, self.retry = trade, total, at_once, timeout, retry
        self.host_total = host_total
        self._children: dict[int, _Child] = {}  # by file descriptor of the answers

    def work(self, orders: Sequence[Order]) -> Iterator[tuple[Order, Answer]]:
        """Every order with its answer, in the order in which they end."""
        again: list[Order] = []
        gc.collect()
        gc.freeze()  # children would copy every page on which the collector moves a mark
        try:
            for child, answer in self._all(deque(orders), self.at_once):
                if child.company and self.retry(answer):
                    again.append(child.order)
                else:
                    yield child.order, answer
            for child, answer in self._all(deque(again), 1):
                yield child.order, {**answer, "alone": True}
        finally:
            self._stop()
            gc.unfreeze()

    def _all(self, orders: deque[Order], at_once: int) -> Iterator[tuple[_Child, Answer]]:
        while orders or self._children:
            while orders and len(self._children) < at_once and self._host_has_room(orders[0]):
                self._fork(orders.popleft())
            self._give_leave()
            self._listen()
            self._kill_late()
            yield from self._reap()

    def _fork(self, order: Order) -> None:
        answers, child_answers = os.pipe()
        child_leave, leave = os.pipe()
        log = self.trade.log(order)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for other in self._children.values():
                os.close(other.answers)
                os.close(other.leave)
            os.close(answers)
            os.close(leave)
            _child(self.trade, order, child_answers, child_leave, log)
        os.close(child_answers)
        os.close(child_leave)
        self._children[answers] = _Child(order, pid, answers, leave, time.monotonic())

    def _host_has_room(self, order: Order) -> bool:
        if self.host_total is None or not self._children:
            return True
        taken = sum(self.trade.host(child.order) for child in self._children.values())
        return taken + self.trade.host(order) <= self.host_total

    def _promised(self) -> int:
        return sum(self.trade.base + child.taken for child in self._children.values())

    def _in(self, *states: str) -> list[_Child]:
        return [child for child in self._children.values() if child.state in states]

    def _let(self, child: _Child, state: str) -> None:
        child.state, child.since = state, time.monotonic()
        os.write(child.leave, b"g")

    def _give_leave(self) -> None:
        """Let the first children that fit run; one that needs more than there is runs when nobody else does."""
        if self.trade.turns and self._in("paused", "reading", "answered") and not self._in("running"):
            self._give_turn()
            return
        for child in self._in("ready")[:LOOK_AHEAD]:
            running = self._in("running", "paused", "reading", "answered", "ended")
            need = min(self.trade.needs(child.order), self.total)
            if running and self._promised() + need > self.total:
                continue
            if self.trade.turns and len(running) >= self.trade.turns:
                return
            child.taken = need
            child.company = bool(running)
            for other in running:
                other.company = True
            self._let(child, "running")

    def _give_turn(self) -> None:
        """The next that pauses goes on, when nobody does; when all have answered they may end."""
        if self._in("reading"):
            return
        paused = self._in("paused")
        if paused:
            self._let(paused[0], "reading")
            return
        for child in self._in("answered"):
            self._let(child, "ended")

    def _listen(self) -> None:
        readable = [child.answers for child in self._children.values() if child.state != "ended"]
        ended = len(readable) < len(self._children)
        for descriptor in select.select(readable, [], [], 0.005 if ended or not readable else 0.25)[0]:
            child = self._children[descriptor]
            part = os.read(descriptor, 1 << 20)
            child.text += part
            before = child.state
            if not part:
                child.state = "ended"
            elif child.state == "preparing" and b"ready\n" in child.text:
                child.state = "ready"
            elif child.state == "running" and b"paused\n" in child.text:
                child.state = "paused"
            elif self.trade.turns and child.text.endswith(b"}\n"):
                child.state = "answered"
            if child.state != before:
                child.since = time.monotonic()

    def _kill_late(self) -> None:
        for child in self._children.values():
            if (
                child.state not in ("ready", "paused", "answered")
                and not child.killed
                and time.monotonic() - child.since > self.timeout
            ):
                child.killed = True
                os.kill(child.pid, signal.SIGKILL)

    def _reap(self) -> list[tuple[_Child, Answer]]:
        """Children whose process is gone: only then the driver has taken its memory back."""
        done = []
        for child in list(self._children.values()):
            if child.state != "ended" or os.waitpid(child.pid, os.WNOHANG)[0] == 0:
                continue
            self._forget(child)
            done.append((child, self._answer(child)))
        return done

    def _answer(self, child: _Child) -> Answer:
        lines = [line for line in child.text.decode(errors="replace").splitlines() if line.startswith("{")]
        if lines:
            answer: Answer = json.loads(lines[-1])
            return answer
        if child.killed:
            return {"failed": f"took longer than {self.timeout:g} s"}
        return {"failed": "the process ended without an answer"}

    def _forget(self, child: _Child) -> None:
        os.close(child.answers)
        os.close(child.leave)
        del self._children[child.answers]

    def _stop(self) -> None:
        for child in list(self._children.values()):
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            self._forget(child)


def _child(trade: Trade, order: Order, answers: int, leave: int, log: Path | None) -> None:
    """The life of a child; it never returns."""

    def wait(word: bytes) -> None:
        os.write(answers, word)
        if not os.read(leave, 1):
            os._exit(1)  # the parent is gone

    try:
        output = os.open(log if log is not None else os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
        try:
            prepared = trade.prepare(order)
            wait(b"ready\n")
            answer = trade.run(prepared, lambda: wait(b"paused\n"))
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        _write_all(answers, (json.dumps(answer) + "\n").encode())
        sys.stdout.flush()
        sys.stderr.flush()
        if trade.turns:
            os.read(leave, 1)  # a process that ends keeps the driver busy: not while another one is read
    finally:
        os._exit(0)  # nothing of the parent's is to be closed or written a second time


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
