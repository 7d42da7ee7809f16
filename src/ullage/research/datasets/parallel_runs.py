"""Many runs on one GPU: each in a process forked from this one, together as far as the GPU's memory allows.

Importing PyTorch takes seconds, a run a fraction of one. This process imports, and never touches CUDA: a forked child
then makes a context of its own as any fresh process does. A child prepares (model, context), says so, and waits for
leave to run, which it gets when the GPU has room for it; memory is promised to it only while it trains.

In turns (`RunKind.turns`), children that have leave come to a point where they pause; when all of them are there, they
go on one after the other, each while the others stand still. They end together, when the last one is done.
"""

from __future__ import annotations

import gc
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.isolation.forking import ForkedHere, Pause

Row = dict[str, Any]
Answer = dict[str, Any]
LOOK_AHEAD = 64  # of the children that wait, one that fits goes before one that does not; never more than so many


@dataclass(frozen=True, kw_only=True)
class RunKind:
    """What the runs do, and what they take.

    `prepare(row)` makes whatever a run needs; `run(prepared, pause)` gives the answer, and calls `pause()` once where
    it is to wait for its turn, if children take turns (`turns` is how many at most together; 0: they do not).
    `gpu_memory(row)` is what a run may take of the GPU, `before_run` what a child takes before it runs, and
    `host_memory(row)` what a child may take of the machine's own memory. `log(row)` is a file for a child's output.
    """

    prepare: Callable[[Row], Any]
    run: Callable[[Any, Callable[[], None]], Answer]
    gpu_memory: Callable[[Row], int]
    before_run: int = 0
    turns: int = 0
    host_memory: Callable[[Row], int] = lambda row: 0
    log: Callable[[Row], Path | None] = lambda row: None


class _Run:
    """A run and its child."""

    def __init__(self, row: Row, kind: RunKind) -> None:
        def work(pause: Pause) -> Answer:
            prepared = kind.prepare(row)
            pause("ready")
            return kind.run(prepared, lambda: pause("paused"))

        self.row, self.child = row, ForkedHere(work, log=kind.log(row), stay=kind.turns > 0)
        self.state = "preparing"  # then "ready", "running", with turns "paused", "reading", "answered", at last "ended"
        self.since = time.monotonic()
        self.promised = 0  # of the GPU's memory
        self.in_company = False  # others ran at the same time
        self.is_late = False

    def fileno(self) -> int:
        return self.child.fileno()

    def enter(self, state: str) -> None:
        if state != self.state:
            self.state, self.since = state, time.monotonic()


class ParallelRuns:
    """Runs at work: at most `at_once`, what they take of the GPU together at most `total`.

    `for row, answer in runs.work(rows)` gives each as it ends. A run that did not end well while others ran is tried
    again alone, once, after all the others; `retry(answer)` says which answers are such.
    """

    def __init__(
        self, kind: RunKind, *, total: int, at_once: int, timeout: float, host_total: int | None = None,
        retry: Callable[[Answer], bool] = lambda answer: "failed" in answer,
    ) -> None:  # fmt: skip
        self.kind, self.total, self.at_once, self.timeout, self.retry = kind, total, at_once, timeout, retry
        self.host_total = host_total
        self._runs: list[_Run] = []

    def work(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Answer]]:
        """Every row with its answer, in the order in which they end."""
        again: list[Row] = []
        gc.collect()
        gc.freeze()  # children would copy every page on which the collector moves a mark
        try:
            for run, answer in self._all(deque(rows), self.at_once):
                if run.in_company and self.retry(answer):
                    again.append(run.row)
                else:
                    yield run.row, answer
            for run, answer in self._all(deque(again), 1):
                yield run.row, {**answer, "alone": True}
        finally:
            while self._runs:
                self._runs.pop().child.close()
            gc.unfreeze()

    def _all(self, rows: deque[Row], at_once: int) -> Iterator[tuple[_Run, Answer]]:
        while rows or self._runs:
            while rows and len(self._runs) < at_once and self._host_has_room(rows[0]):
                self._runs.append(_Run(rows.popleft(), self.kind))
            self._give_leave()
            self._listen()
            self._kill_late()
            yield from self._ended()

    def _host_has_room(self, row: Row) -> bool:
        if self.host_total is None or not self._runs:
            return True
        taken = sum(self.kind.host_memory(run.row) for run in self._runs)
        return taken + self.kind.host_memory(row) <= self.host_total

    def _promised(self) -> int:
        return sum(self.kind.before_run + run.promised for run in self._runs)

    def _in(self, *states: str) -> list[_Run]:
        return [run for run in self._runs if run.state in states]

    def _let(self, run: _Run, state: str) -> None:
        run.enter(state)
        run.child.go_on()

    def _give_leave(self) -> None:
        """Let the first that fit run; one that needs more than there is runs when nobody else does."""
        if self.kind.turns and self._in("paused", "reading", "answered") and not self._in("running"):
            self._give_turn()
            return
        for run in self._in("ready")[:LOOK_AHEAD]:
            others = self._in("running", "paused", "reading", "answered", "ended")
            wanted = min(self.kind.gpu_memory(run.row), self.total)
            if others and self._promised() + wanted > self.total:
                continue
            if self.kind.turns and len(others) >= self.kind.turns:
                return
            run.promised, run.in_company = wanted, bool(others)
            for other in others:
                other.in_company = True
            self._let(run, "running")

    def _give_turn(self) -> None:
        """The next that pauses goes on, when nobody does; when all have answered they may end."""
        if self._in("reading"):
            return
        paused = self._in("paused")
        if paused:
            self._let(paused[0], "reading")
            return
        for run in self._in("answered"):
            self._let(run, "ended")

    def _listen(self) -> None:
        speaking = [run for run in self._runs if run.state != "ended"]
        soon = len(speaking) < len(self._runs) or not speaking
        for run in select.select(speaking, [], [], 0.005 if soon else 0.25)[0]:
            run.child.read()
            if run.child.is_silent:
                run.enter("ended")
            elif run.child.has_answered:
                run.enter("answered" if self.kind.turns else run.state)
            elif run.state == "preparing" and run.child.at == "ready":
                run.enter("ready")
            elif run.state == "running" and run.child.at == "paused":
                run.enter("paused")

    def _kill_late(self) -> None:
        for run in self._runs:
            waits = run.state in ("ready", "paused", "answered")
            if not waits and not run.is_late and time.monotonic() - run.since > self.timeout:
                run.is_late = True
                run.child.kill()

    def _ended(self) -> list[tuple[_Run, Answer]]:
        done = [run for run in self._in("ended") if run.child.has_ended()]
        self._runs = [run for run in self._runs if run not in done]
        return [(run, self._answer(run)) for run in done]

    def _answer(self, run: _Run) -> Answer:
        outcome = run.child.close()
        if outcome.answer is not None:
            return outcome.answer
        if run.is_late:
            return {"failed": f"took longer than {self.timeout:g} s"}
        return {"failed": outcome.failure if outcome.reason == "error" else f"the process {outcome.failure}"}
