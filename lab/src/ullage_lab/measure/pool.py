"""Runs many jobs on one GPU, each in a process forked from this one: at once as far as memory allows, or in turns.

Importing PyTorch takes seconds, a run a fraction of one. This process imports, and never touches CUDA: a forked child
then makes a context of its own as any fresh process does. A child prepares (model, context), says so, and waits for
leave to run, which it gets when the GPU has room for it; memory is promised to it only while it trains.

In turns (`RunKind.turns`), children that have leave come to a point where they pause; when enough of them are there,
they go on one after the other. Meanwhile all others stand still, wherever they are (SIGSTOP), since the host's time is
read too. One that pauses again waits until all others had as many turns: so runs are read in rounds.

Where a child can be made as good as new (`RunKind.renew`), it does not end then but takes the next row: to make a
context and to load kernels takes longer than to read a run. One whose answer is doubtful ends all the same.
"""

import gc
import itertools
import json
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ullage_lab.forking import ForkedHere, Pause

Row = dict[str, Any]
Answer = dict[str, Any]
LOOK_AHEAD = 64  # of the children that wait, one that fits goes before one that does not; never more than so many


@dataclass(frozen=True, kw_only=True)
class RunKind:
    """The work of the runs, and the resources that they need.

    `prepare(row)` makes whatever a run needs; `run(prepared, pause)` gives the answer, and calls `pause()` where it is
    to wait for a turn, if children take turns (`turns` is how many wait before the first goes on; 0: none do).
    `gpu_memory(row)` is what a run may take of the GPU, `before_run` what a child takes before it runs, and
    `host_memory(row)` what a child may take of the machine's own memory. `log(row)` is a file for a child's output.
    `renew()` gives back what a run took, so that a child that takes turns can go on with another row; rows that are not
    the first of their process have `in_process`, how many were before.
    """

    prepare: Callable[[Row], Any]
    run: Callable[[Any, Callable[[], Any]], Answer]
    gpu_memory: Callable[[Row], int]
    before_run: int = 0
    turns: int = 0
    host_memory: Callable[[Row], int] = lambda row: 0
    log: Callable[[Row], Path | None] = lambda row: None
    renew: Callable[[], None] | None = None


class _Run:
    """A run and its child, which may go on with another row (`take`)."""

    def __init__(self, row: Row, kind: RunKind) -> None:
        def work(pause: Pause) -> Answer:
            order, before, turns = row, 0, itertools.count()
            while True:
                prepared = kind.prepare(order)
                pause("ready")
                answer = kind.run(prepared, lambda: pause(f"paused {next(turns)}"))
                del prepared
                if kind.renew is None:
                    return answer
                line = pause("answered", answer | ({"in_process": before} if before else {}))
                if not line:
                    os._exit(0)  # it has sent its answer
                kind.renew()
                order, before = json.loads(line), before + 1

        self.row, self.child = row, ForkedHere(work, log=kind.log(row), stay=kind.turns > 0)
        self.state = "preparing"  # then "ready", "running", with turns "paused", "reading", "answered", at last "ended"
        self.since = time.monotonic()
        self.promised = 0  # of the GPU's memory
        self.is_shared = False  # others ran at the same time, or before it in its process
        self.is_late = False
        self.paused_at = ""
        self.turns = 0  # that it had with this row
        self.is_told = False  # its answer is known already
        self.may_go_on = False

    def take(self, row: Row) -> None:
        """Continue with another row. The memory of the last one is freed when this one is ready."""
        self.row, self.is_shared, self.is_told, self.may_go_on, self.turns = row, True, False, False, 0
        self.enter("preparing")
        self.child.go_on(json.dumps(row))

    def has_paused(self) -> bool:
        """Return whether it has paused since the last call; each pause has its own name."""
        place = self.child.at or ""
        if not place.startswith("paused") or place == self.paused_at:
            return False
        self.paused_at = place
        return True

    def fileno(self) -> int:
        return self.child.fileno()

    def enter(self, state: str) -> None:
        if state != self.state:
            self.state, self.since = state, time.monotonic()


class ParallelRuns:
    """Runs in progress: at most `at_once`, with at most `total` of the GPU together.

    `for row, answer in runs.work(rows)` gives each as it ends. A run that did not end well while others ran is tried
    again alone, once, after all the others; `retry(answer)` says which answers are such.
    """

    def __init__(
        self,
        kind: RunKind,
        *,
        total: int,
        at_once: int,
        timeout: float,
        host_total: int | None = None,
        retry: Callable[[Answer], bool] = lambda answer: "failed" in answer,
    ) -> None:
        self.kind, self.total, self.at_once, self.timeout, self.retry = kind, total, at_once, timeout, retry
        self.host_total = host_total
        self._runs: list[_Run] = []
        self._left: deque[Row] = deque()
        self._is_still = False  # a child has its turn, and all others are stopped
        self._stopped: list[_Run] = []

    def work(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Answer]]:
        """Yield every row with its answer, in the order in which they end."""
        again: list[Row] = []
        gc.collect()
        gc.freeze()  # children would copy every page that the collector marks
        try:
            for run, answer in self._all(deque(rows), self.at_once, self.kind):
                if run.is_shared and self.retry(answer):
                    again.append(run.row)
                else:
                    yield run.row, answer
            for run, answer in self._all(deque(again), 1, replace(self.kind, renew=None)):
                yield run.row, {**answer, "alone": True}
        finally:
            while self._runs:
                self._runs.pop().child.close()
            gc.unfreeze()

    def _all(self, rows: deque[Row], at_once: int, kind: RunKind) -> Iterator[tuple[_Run, Answer]]:
        self._left = rows
        while rows or self._runs:
            while rows and len(self._runs) < at_once and not self._is_still and self._has_room(rows[0]):
                self._runs.append(_Run(rows.popleft(), kind))
            self._give_leave()
            self._give_turn()
            self._give_leave()
            self._listen()
            self._kill_late()
            yield from self._told()
            yield from self._ended()

    def _has_room(self, row: Row, instead_of: _Run | None = None) -> bool:
        """Whether the host's memory is enough to prepare another run."""
        others = [run for run in self._runs if run is not instead_of]
        if self.host_total is None or not others:
            return True
        taken = sum(self.kind.host_memory(run.row) for run in others)
        return taken + self.kind.host_memory(row) <= self.host_total

    def _in(self, *states: str) -> list[_Run]:
        return [run for run in self._runs if run.state in states]

    def _let(self, run: _Run, state: str) -> None:
        run.enter(state)
        run.child.go_on()

    def _give_leave(self) -> None:
        """Start the first runs that fit; one that needs more than the total runs alone."""
        for run in [] if self._is_still else self._in("ready")[:LOOK_AHEAD]:
            others = self._in("running", "paused", "reading", "answered", "ended")
            wanted = min(self.kind.gpu_memory(run.row), self.total)
            promised = sum(self.kind.before_run + other.promised for other in self._runs)
            if any(other.promised for other in self._runs) and promised + wanted > self.total:
                continue
            run.promised, run.is_shared = wanted, run.is_shared or bool(others)
            for other in others:
                other.is_shared = True
            self._let(run, "running")

    def _give_turn(self) -> None:
        """Resume a paused run, fewest turns first; after all of them, finished runs take rows or end."""
        paused = self._in("paused")
        if self._in("reading") or not self.kind.turns:
            return
        enough = len(paused) >= self.kind.turns or not self._in("running", "preparing")
        if paused and (self._is_still or enough and not self._in("ended")):
            self._hold_still(True)
            following = min(paused, key=lambda run: (run.turns, run.since))
            following.turns += 1
            following.child.set_suspended(False)
            self._let(following, "reading")
            return
        self._hold_still(False)
        for run in self._in("answered"):
            if run.may_go_on and self._left and self._has_room(self._left[0], instead_of=run):
                run.take(self._left.popleft())
            else:
                self._let(run, "ended")

    def _hold_still(self, still: bool) -> None:
        if still and not self._is_still:
            self._stopped = self._in("preparing", "running")
            for run in self._stopped:
                run.child.set_suspended()
        elif not still:
            for run in self._stopped:  # some have said since that they are ready, or pause
                run.child.set_suspended(False)
            self._stopped = []
        self._is_still = still

    def _listen(self) -> None:
        speaking = [run for run in self._runs if run.state != "ended"]
        soon = len(speaking) < len(self._runs) or not speaking
        for run in select.select(speaking, [], [], 0.005 if soon else 0.25)[0]:
            run.child.read()
            if run.child.is_silent:
                run.enter("ended")
            elif run.child.has_answered or run.state in ("running", "reading") and run.child.at == "answered":
                run.enter("answered" if self.kind.turns else run.state)
            elif run.state == "preparing" and run.child.at == "ready":
                run.promised = 0
                run.enter("ready")
            elif run.state in ("running", "reading") and run.has_paused():
                run.enter("paused")

    def _kill_late(self) -> None:
        for run in self._runs:
            if run.state in ("ready", "paused", "answered") or self._is_still and run.state != "reading":
                continue
            if not run.is_late and time.monotonic() - run.since > self.timeout:
                run.is_late = True
                run.child.kill()

    def _told(self) -> Iterator[tuple[_Run, Answer]]:
        """Yield the answers of children that may continue."""
        for run in self._in("answered"):
            if not run.is_told and not run.child.has_answered and run.child.so_far is not None:
                run.is_told, run.may_go_on = True, not self.retry(run.child.so_far)
                yield run, run.child.so_far

    def _ended(self) -> list[tuple[_Run, Answer]]:
        done = [run for run in self._in("ended") if run.child.has_ended()]
        self._runs = [run for run in self._runs if run not in done]
        answers = [(run, self._answer(run)) for run in done]
        return [(run, answer) for run, answer in answers if not run.is_told]

    def _answer(self, run: _Run) -> Answer:
        outcome = run.child.close()
        if outcome.answer is not None:
            return outcome.answer
        if run.is_late:
            return {"failed": f"took longer than {self.timeout:g} s"}
        return {"failed": outcome.failure if outcome.reason == "error" else f"the process {outcome.failure}"}
