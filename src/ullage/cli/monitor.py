"""`ullage top`: GPUs and their processes as a live table, one reading, JSON, or a recording."""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ullage.cli.options import Json, option, parse_interval
from ullage.errors import InvalidValue, NoGPUSource
from ullage.text import plain
from ullage.units import GIB

if TYPE_CHECKING:
    from ullage.manager.monitor.readings import Source
    from ullage.manager.monitor.sampling import Monitor


_DCGM_SPEAKS = 2.5  # seconds until DCGM reports activity; its first row has none


def top(
    once: Annotated[bool, option("Print one reading and exit.", "--once")] = False,
    as_json: Json = False,
    watch: Annotated[bool, option("With --json: print a line for each reading, until Ctrl-C.", "--watch")] = False,
    interval: Annotated[str, option("Time between two readings, from 0.1s to 1h.", "TIME")] = "1s",
    count: Annotated[int | None, option("Exit after N readings.", "N", min=1, default="unlimited")] = None,
    cards: Annotated[
        Path | None, option("Show the virtual GPUs in this folder.", "FOLDER", default="those of this home")
    ] = None,
    record: Annotated[Path | None, option("Append each reading to this file, as a line of JSON.", "FILE")] = None,
) -> None:
    """Show live GPU activity, memory, power and processes.

    '-' (null in JSON) means unknown; columns without any value are left out. GRACT, SMACT, SMOCC, DRAMA and TENSOR are
    means since the last reading.

    Examples:

      ullage top
      ullage top --interval 5s --record readings.jsonl
    """
    from ullage.manager.monitor.sampling import Monitor

    seconds = parse_interval(interval)
    if once and (watch or count):
        raise InvalidValue("--once prints one reading; leave out --watch and --count, or --once")
    live = not as_json and not once and sys.stdout.isatty()
    # Without a terminal there is nothing to redraw: print one reading, unless --record needs them all.
    endless = live or watch or (record is not None and not once)
    limit = count if count is not None else None if endless else 1
    with _recording(record) as file, contextlib.suppress(KeyboardInterrupt), _terminated_like_ctrl_c():
        monitor = Monitor(_source(cards, seconds), seconds, max(90.0, seconds), host_interval=0.0)
        try:
            with _shown(as_json, live, silent=record is not None and not once and not watch) as show:
                _go_on(monitor, seconds, limit, show, file)
        finally:
            monitor.source.close()


def _go_on(
    monitor: "Monitor", interval: float, limit: int | None, show: Callable[[dict[str, Any]], None], file: IO[str] | None
) -> None:
    """Read, show and wait in a loop. The first reading only starts counters."""
    from ullage.manager.monitor.sampling import snapshot

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


def _source(cards: Path | None, interval: float) -> "Source":
    """Return the source of the named cards or of this machine's GPUs, or else of the virtual cards of this home."""
    from ullage.home import home
    from ullage.manager.monitor.readings import AT_EVERY_LOOK
    from ullage.manager.monitor.sources import best_source

    try:
        return best_source(cards, interval, rates=AT_EVERY_LOOK)
    except NoGPUSource as error:
        folders = [folder for folder in sorted((home() / "cards").glob("*")) if folder.is_dir()]
        if cards is not None:
            raise InvalidValue(str(error)) from None
        if len(folders) != 1:
            raise
        return best_source(folders[0], interval)


@contextlib.contextmanager
def _shown(as_json: bool, live: bool, silent: bool) -> Iterator[Callable[[dict[str, Any]], None]]:

    console = Console()
    ascii_only = console.options.ascii_only
    if as_json:
        yield lambda now: print(json.dumps(now), flush=True)
    elif live:
        from rich.live import Live

        with Live(console=console, screen=True, auto_refresh=False) as picture:
            yield lambda now: picture.update(view(now, console.width, console.height, ascii_only), refresh=True)
    elif silent:
        yield lambda now: None
    else:
        yield lambda now: console.print(view(now, console.width, ascii_only=ascii_only))


def _recording(path: Path | None) -> contextlib.AbstractContextManager[IO[str] | None]:
    try:
        return contextlib.nullcontext() if path is None else path.open("a", encoding="utf-8")
    except OSError as error:
        raise InvalidValue(f"--record must be a writable file, got {path}: {error.strerror}") from None


@contextlib.contextmanager
def _terminated_like_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, to restore the terminal and end child processes, even if SIGINT is ignored."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# The table: a row for each GPU, then a row for each process. Narrow terminals get fewer columns.

Gpu = dict[str, Any]
UNKNOWN = "-"
_FULL, _BUSY = 0.9, 0.8  # memory shown in red; SM activity shown in yellow, from which another job would suffer
_NAME, _LEAST_BAR, _MOST_BAR, _SIZES = 14, 6, 24, 9  # widths of columns


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    cell: Callable[[Gpu], Text]
    left: bool = False


def view(snapshot: dict[str, Any], width: int, height: int | None = None, ascii_only: bool = False) -> RenderableType:
    """Return the view for a terminal of this size; `height` limits the rows of processes.

    Console().print(view(snapshot(monitor), width=80))
    """
    gpus = snapshot["gpus"]
    columns, hidden, unknown = _fitting(width, gpus)
    parts: list[RenderableType] = [_heading(snapshot, width), _gpu_table(gpus, columns, width, ascii_only)]
    if hidden:
        parts.append(Text(f"a wider terminal shows {', '.join(hidden)} too", style="dim"))
    if unknown:
        parts.append(Text(f"not known here: {', '.join(unknown)}", style="dim"))
    room = None if height is None else max(1, height - len(gpus) - len(parts) - 4)
    parts += [Text(""), _process_table(gpus, width, room)]
    if snapshot["hint"]:
        parts.append(Text(snapshot["hint"], style="dim"))
    return Group(*parts)


def _heading(snapshot: dict[str, Any], width: int) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot["time"]))
    count = sum(not gpu["mig"] for gpu in snapshot["gpus"])
    text = f"ullage top  {clock}  {count} GPU{'' if count == 1 else 's'}, source {snapshot['source']}"
    if snapshot["failures"]:
        text += f", {snapshot['failures']} looks failed"
    heading = Text(text, style="bold")
    heading.truncate(width, overflow="ellipsis")
    return heading


# GPUs.


def _fitting(width: int, gpus: list[Gpu]) -> tuple[list[_Column], list[str], list[str]]:
    """Return the columns that fit, most important first; the titles of hidden ones; and of those without values."""
    live = [gpu for gpu in gpus if not gpu["lost"]]
    known = [column for column in (*_ALWAYS, *_WHEN_WIDE) if any(column.cell(gpu).plain != UNKNOWN for gpu in live)]
    unknown = [column.title for column in (*_ALWAYS, *_WHEN_WIDE) if live and column not in known]
    shown = [column for column in _ALWAYS if column in known]
    hidden: list[str] = []
    left = width - sum(column.width + 1 for column in shown) - (2 + 1 + _NAME + 1 + _LEAST_BAR + 1 + _SIZES)
    for column in (column for column in _WHEN_WIDE if column in known):
        if not hidden and left >= column.width + 1:
            shown.append(column)
            left -= column.width + 1
        else:
            hidden.append(column.title)
    return shown, hidden, unknown


def _gpu_table(gpus: list[Gpu], columns: list[_Column], width: int, ascii_only: bool) -> Table:
    spare = width - sum(column.width + 1 for column in columns) - (2 + 1 + 1 + _LEAST_BAR + 1 + _SIZES)
    name = max(4, min(max((len(_name(gpu)) for gpu in gpus), default=4), spare, 2 * _NAME))
    bar = max(_LEAST_BAR, min(_MOST_BAR, _LEAST_BAR + spare - name))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", expand=False)
    table.add_column("", width=2, no_wrap=True)
    table.add_column("GPU", width=name, no_wrap=True, overflow="ellipsis")
    table.add_column("memory", width=bar, no_wrap=True)
    table.add_column("GiB", width=_SIZES, no_wrap=True, justify="right")
    for column in columns:
        table.add_column(column.title, width=column.width, no_wrap=True, justify="right")
    for gpu in gpus:
        first = Text("" if gpu["mig"] else str(gpu["index"]), style="bold")
        if gpu["lost"]:
            table.add_row(
                first, Text(_name(gpu)), Text("lost", style="bold red"), *[Text(UNKNOWN)] * (len(columns) + 1)
            )
        else:
            cells = [column.cell(gpu) for column in columns]
            table.add_row(first, Text(_name(gpu)), _bar(gpu, bar, ascii_only), _memory(gpu), *cells)
    return table


def _name(gpu: Gpu) -> str:
    name = str(gpu["name"]).removeprefix("NVIDIA ")
    if gpu["mig"]:
        return "└ " + name[name.find("MIG") :] if "MIG" in name else f"└ {name}"
    return name


def _bar(gpu: Gpu, width: int, ascii_only: bool) -> Text:
    used, total = gpu["memory_used"], gpu["memory_total"]
    if used is None or not total:
        return Text(UNKNOWN)
    share = min(1.0, used / total)
    filled = int(share * width) or (1 if used else 0)  # the bar is full only if memory is
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    style = "red" if share >= _FULL else "green"
    return Text(full * filled, style=style) + Text(empty * (width - filled), style="dim")


def _memory(gpu: Gpu) -> Text:
    return _pair(_gib(gpu["memory_used"]), _gib(gpu["memory_total"]))


def _gib(size: int | None) -> str:
    if size is None:
        return UNKNOWN
    value = size / GIB
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _share(key: str) -> Callable[[Gpu], Text]:
    def cell(gpu: Gpu) -> Text:
        value = gpu[key]
        busy = key == "smact" and value is not None and value > _BUSY
        return Text(UNKNOWN if value is None else f"{value * 100:.0f}%", style="yellow" if busy else "")

    return cell


def _number(key: str, unit: str) -> Callable[[Gpu], Text]:
    return lambda gpu: Text(UNKNOWN if gpu[key] is None else f"{gpu[key]:.0f}{unit}")


def _clocks(gpu: Gpu) -> Text:
    return _pair(*(UNKNOWN if gpu[key] is None else f"{gpu[key]:.0f}" for key in ("sm_clock_mhz", "memory_clock_mhz")))


def _traffic(gpu: Gpu) -> Text:
    return _pair(_rate(gpu["pcie_rx_bps"]), _rate(gpu["pcie_tx_bps"]))


def _pair(one: str, other: str) -> Text:
    return Text(UNKNOWN if one == other == UNKNOWN else f"{one}/{other}")


def _rate(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            scaled = value / factor
            return f"{scaled:.{1 if scaled < 10 else 0}f}{unit}"
    return f"{value:.0f}"


_ALWAYS = [
    _Column("GRACT", 5, _share("gract")),
    _Column("SMACT", 5, _share("smact")),
    _Column("SMOCC", 5, _share("smocc")),
    _Column("DRAMA", 5, _share("drama")),
]
_WHEN_WIDE = [
    _Column("power", 5, _number("power_w", "W")),
    _Column("TENSOR", 6, _share("tensor")),
    _Column("temp", 5, _number("temperature_c", "°C")),
    _Column("PCIe in/out", 11, _traffic),
    _Column("MHz SM/mem", 10, _clocks),
    _Column("UTIL", 4, _share("utilization")),
]


# Processes.


def _process_table(gpus: list[Gpu], width: int, room: int | None) -> Table | Text:
    rows = [(gpu, process) for gpu in gpus for process in gpu["processes"] or []]
    unknown = [gpu for gpu in gpus if gpu["processes"] is None]
    if not rows:
        return Text("processes are unknown" if unknown else "no processes on these GPUs", style="dim")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", width=width)
    for title, size in (("GPU", 3), ("pid", 8)):
        table.add_column(title, width=size, no_wrap=True, justify="right")
    table.add_column("user", width=8 if width < 100 else 14, no_wrap=True, overflow="ellipsis")
    for title, size in (("GiB", 6), ("CPU", 6), ("RAM GiB", 7)):
        table.add_column(title, width=size, no_wrap=True, justify="right")
    table.add_column("command", no_wrap=True, overflow="ellipsis", ratio=1)
    shown = rows if room is None or len(rows) <= room else rows[: max(0, room - 1)]
    for gpu, process in shown:
        cpu = UNKNOWN if process["cpu"] is None else f"{process['cpu'] * 100:.0f}%"
        table.add_row(
            str(gpu["index"]),
            str(process["pid"]),
            _text_of(process["user"]),
            _gib(process["memory"]),
            cpu,
            _gib(process["ram"]),
            _text_of(process["command"]),
        )
    if len(shown) < len(rows):
        table.add_row("", "", "", "", "", "", Text(f"and {len(rows) - len(shown)} more", style="dim"))
    return table


def _text_of(text: str | None) -> Text:
    """Return a text in one line without control characters, since any user can choose the name of a process."""
    if not text:
        return Text(UNKNOWN)
    return Text(" ".join(plain(text).split()))
