"""`ullage top`: what the GPUs and the processes on them do now, live, once, as JSON, or recorded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ullage.cli.options import Json
from ullage.errors import InvalidValue
from ullage.units import parse_duration

if TYPE_CHECKING:
    from ullage.monitor import Monitor
    from ullage.monitor.readings import Source

_PIPED_WIDTH = 140  # a pipe has no width of its own
_DCGM_SPEAKS = 2.5  # seconds; its first row after a start has no activity yet
_HELP = """Show what GPUs do: memory, activity, power, temperature, clocks, PCIe, and the processes on them.

What is not known is shown as '-' (null in JSON). GRACT, SMACT, SMOCC, DRAMA and TENSOR are means since the last look.

Examples:

  ullage top

  ullage top --once --json

  ullage top --interval 5s --record readings.jsonl

  ullage top --virtual ~/.local/state/ullage/cards/serve
"""


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one reading and stop.")] = False,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="With --json: a line a reading, until Ctrl-C.")] = False,
    interval: Annotated[str, typer.Option(help="Time between two readings, such as 1s or 500ms.")] = "1s",
    count: Annotated[int | None, typer.Option(help="Stop after so many readings.", min=1)] = None,
    virtual: Annotated[
        Path | None,
        typer.Option(help="Watch the virtual cards of this folder; without a GPU, those of 'ullage serve' are found."),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Append every reading to this file, a line of JSON each.")] = None,
) -> None:
    """Show what GPUs and the processes on them do now."""
    from ullage.monitor import Monitor

    seconds = parse_duration(interval)
    if not 0.1 <= seconds <= 3600:
        raise InvalidValue(f"needed an interval from 0.1s to 1h; found {interval!r}")
    if once and (watch or count):
        raise InvalidValue("--once prints one reading; leave out --watch and --count, or --once")
    live = not as_json and not once and sys.stdout.isatty()
    # Without a terminal there is nothing to redraw: one reading, unless somebody wants them all in a file.
    endless = live or watch or (record is not None and not once)
    limit = count if count is not None else None if endless else 1
    with _recording(record) as file, contextlib.suppress(KeyboardInterrupt), _terminated_like_ctrl_c():
        monitor = Monitor(_source(virtual, seconds), seconds, max(90.0, seconds), host_interval=0.0)
        try:
            with _shown(as_json, live, silent=record is not None and not once and not watch) as show:
                _go_on(monitor, seconds, limit, show, file)
        finally:
            monitor.source.close()


top.__doc__ = _HELP


def _go_on(
    monitor: Monitor, interval: float, limit: int | None, show: Callable[[dict[str, Any]], None], file: IO[str] | None
) -> None:
    """Look, show, wait; the first look only starts the counters that need two."""
    from ullage.monitor.snapshot import snapshot

    monitor.look()
    first = interval if limit != 1 else _DCGM_SPEAKS if monitor.source.name == "dcgm" else min(interval, 1.0)
    due = time.monotonic() + first
    done = 0
    while limit is None or done < limit:
        time.sleep(max(0.0, due - time.monotonic()))
        due = max(due + interval, time.monotonic())
        monitor.look()
        now = snapshot(monitor)
        if file is not None:
            file.write(json.dumps(now) + "\n")
            file.flush()
        show(now)
        done += 1


def _source(virtual: Path | None, interval: float) -> Source:
    """As named; without a GPU the virtual cards of this home, if it has some: a daemon serves them."""
    from ullage.errors import NoGPUSource
    from ullage.home import home
    from ullage.monitor import best_source
    from ullage.monitor.rates import AT_EVERY_LOOK

    try:
        return best_source(virtual, interval, rates=AT_EVERY_LOOK)
    except NoGPUSource:
        folders = [folder for folder in sorted((home() / "cards").glob("*")) if folder.is_dir()]
        if virtual is not None or len(folders) != 1:
            raise
        return best_source(folders[0], interval)


@contextlib.contextmanager
def _shown(as_json: bool, live: bool, silent: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    from ullage.cli.top_view import view

    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH)
    plain = console.options.ascii_only
    if as_json:
        yield lambda now: print(json.dumps(now), flush=True)
    elif live:
        from rich.live import Live

        with Live(console=console, screen=True, auto_refresh=False) as picture:
            yield lambda now: picture.update(view(now, console.width, console.height, plain), refresh=True)
    elif silent:
        yield lambda now: None
    else:
        yield lambda now: console.print(view(now, console.width, ascii_only=plain))


@contextlib.contextmanager
def _recording(path: Path | None) -> Iterator[IO[str] | None]:
    if path is None:
        yield None
        return
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise InvalidValue(f"needed a file to record to; {path} cannot be written: {error.strerror}") from None
    with file:
        yield file


@contextlib.contextmanager
def _terminated_like_ctrl_c() -> Iterator[None]:
    """A polite kill gives the terminal back and ends child processes too."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
