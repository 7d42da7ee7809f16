"""Progress of long operations on standard error: a bar in a terminal, otherwise a plain line from time to time."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from ullage.cli.exit_codes import INTERRUPTED
from ullage.units import format_duration

if TYPE_CHECKING:
    from rich.progress import Progress

_EVERY = 10.0  # seconds between plain lines
_T = TypeVar("_T")


class Following:
    """Progress: `begin` a part of N steps, describe a step with `doing`, and call `step` after each."""

    def __init__(self, bar: "Progress | None") -> None:
        self.stopped = False
        self._bar, self._task, self._detail = bar, None, ""
        self._what, self._total, self._done = "", None, 0
        self._began = self._printed_at = time.monotonic()

    _task: Any
    _total: int | None

    def begin(self, what: str, total: int | None = None) -> None:
        """Begin a part; the previous one is done."""
        self._what, self._total, self._done, self._detail = what, total, 0, ""
        self._began = time.monotonic()
        if self._bar is None:
            if total is not None:
                self._say(f"{what}: {total} to do")
            return
        if self._task is not None:
            self._bar.update(self._task, visible=False)
        self._task = self._bar.add_task(what, total=total, detail="")

    def doing(self, text: str, done: int | None = None) -> None:
        """Describe the next step; if several run at once, `done` is the number of finished ones."""
        self._detail, self._done = text, self._done if done is None else done
        self._show()

    def step(self, text: str = "") -> None:
        self._done += 1
        self._detail = text or self._detail
        self._show()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.update(
                self._task, completed=self._done, detail=self._detail, refresh=not self._bar.live.auto_refresh
            )
        elif time.monotonic() - self._printed_at > _EVERY:
            of_all = "" if self._total is None else f" of {self._total}"
            about = f", {self._detail}" if self._detail else ""
            after = format_duration(round(time.monotonic() - self._began))
            self._say(f"{self._what}: {self._done}{of_all} done after {after}{about}")

    def stop(self) -> None:
        self.stopped = True
        of_all = "" if self._total is None else f" of {self._total}"
        self._say(f"ullage: stopped; {self._what}: {self._done}{of_all} done")

    def end(self) -> None:
        """Exit with the code for an interrupted command if the user typed Ctrl-C."""
        if self.stopped:
            raise SystemExit(INTERRUPTED)

    def _say(self, line: str) -> None:
        self._printed_at = time.monotonic()
        print(line, file=sys.stderr, flush=True)


@contextmanager
def following(
    what: str, total: int | None = None, *, stoppable: bool = False, forks: bool = False
) -> Iterator[Following]:
    """Show progress inside the `with`. With `stoppable`, Ctrl-C ends only its body, not the command (`stopped`). With
    `forks`, no thread draws the bar, since the body forks.
    """
    console = Console(stderr=True)
    bar = _bar(console, not forks) if console.is_terminal else None
    going = Following(bar)
    with bar or nullcontext():
        going.begin(what, total)
        try:
            yield going
            return
        except KeyboardInterrupt:
            if not stoppable:
                raise
    going.stop()


def each(items: Iterable[_T], what: str, total: int | None = None) -> Iterator[_T]:
    with following(what, total) as going:
        for item in items:
            yield item
            going.step()


def _bar(console: Console, thread: bool) -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    detail = TextColumn("{task.fields[detail]}", markup=False)
    # Prints to the terminal appear above the bar; redirected output stays unchanged.
    return Progress(
        *columns, detail, console=console, transient=True, redirect_stdout=sys.stdout.isatty(), auto_refresh=thread
    )
