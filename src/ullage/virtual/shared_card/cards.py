"""Virtual cards that several processes share. Each card is a small file, locked while it is read or changed.

The file has 256 bytes that describe the card, then one line of 64 bytes for each process: pid, start time, bytes taken,
and its activity in thousandths, if the process declared it. A line is changed with a single write, so a process that is
killed at any moment leaves a readable file. The next reader clears the line of a dead process; the start time
distinguishes it from a later process with the same pid.

PyTorch is not imported here, so a daemon or a monitor can watch cards cheaply.
"""

import fcntl
import json
import os
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from ullage.errors import InvalidValue
from ullage.hardware import gpu_list
from ullage.sandbox.process_identity import Process, is_alive, this_process

VARIABLE = "ULLAGE_CARDS"  # names the folder to a job
STARTUP = Path(__file__).parent / "startup"  # first on a job's PYTHONPATH
MOST_CARDS = 1024
_HEADER, _LINE, _SPARE = 256, 64, 64  # bytes, bytes, lines that a new file has room for
_LARGEST_FILE = _HEADER + _LINE * 65536
_EMPTY = b"-".ljust(_LINE - 1) + b"\n"

_one_at_a_time = threading.RLock()  # a fork while another thread holds a card's lock would give the lock to the child
os.register_at_fork(
    before=_one_at_a_time.acquire, after_in_parent=_one_at_a_time.release, after_in_child=_one_at_a_time.release
)


class DeclaredActivity(NamedTuple):
    """How busy a process says that it keeps a card, from 0 to 1: the share of time with a kernel, and of SMs."""

    gract: float
    smact: float


class _Line(NamedTuple):
    process: Process
    taken: int
    activity: DeclaredActivity | None = None


@dataclass(frozen=True)
class Card:
    """One virtual card, made by `Cards`; `total` is the memory that jobs can use, their contexts included. It computes
    nothing: its activity is that which processes declare."""

    uuid: str
    index: int
    name: str
    total: int
    path: Path

    def processes(self) -> dict[int, int]:
        return {line.process.pid: line.taken for line in self._living()}

    def activities(self) -> dict[int, DeclaredActivity | None]:
        """Return the activity of each process that holds memory; `None` if it declared none."""
        return {line.process.pid: line.activity for line in self._living()}

    def declare(self, activity: DeclaredActivity) -> None:
        """Declare the activity of this process, which must hold memory."""
        with _locked(self.path) as file:
            for place, line in _read_table(file, self.path).items():
                if line.process == this_process():
                    _write_line(file, place, line._replace(activity=activity))

    def _living(self) -> list[_Line]:
        with _locked(self.path, for_writing=False) as file:
            lines = list(_read_table(file, self.path).values())
        living = [line for line in lines if is_alive(line.process)]
        if len(living) < len(lines):
            with _locked(self.path) as file:
                _without_dead(file, _read_table(file, self.path))
        return living

    def used(self) -> int:
        return sum(self.processes().values())

    def free(self) -> int:
        return max(0, self.total - self.used())

    def take(self, size: int, process: Process | None = None) -> bool:
        """Take bytes for this process; if the card has fewer, take nothing and return false."""
        if size < 0:
            raise InvalidValue(f"size must be 0 bytes or more, got {size}")
        with _locked(self.path) as file:
            table = _without_dead(file, _read_table(file, self.path))
            if sum(line.taken for line in table.values()) + size > self.total:
                return False
            _change(file, table, process or this_process(), size)
            return True

    def give(self, size: int, process: Process | None = None) -> None:
        owner = process or this_process()
        with _locked(self.path) as file:
            table = _without_dead(file, _read_table(file, self.path))
            held = sum(line.taken for line in table.values() if line.process == owner)
            if not 0 <= size <= held:
                raise InvalidValue(f"size must be at most the {held} bytes that process {owner.pid} holds, got {size}")
            _change(file, table, owner, -size)


class Cards:
    def __init__(self, folder: Path, cards: Sequence[Card]) -> None:
        self.folder, self.cards = folder, list(cards)

    @classmethod
    def create(cls, folder: str | os.PathLike[str], gpus: str) -> Self:
        """Make the cards that `gpus` names (`"4xA100-40GB"`). Existing cards are kept, with the memory of their jobs,
        and missing ones are added; an existing card of another kind is an error."""
        specs = gpu_list(gpus)
        if len(specs) > MOST_CARDS:
            raise InvalidValue(f"number of virtual cards must be at most {MOST_CARDS}, got {len(specs)}")
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        there = [card.name for card in cls.open(place).cards] if _files(place) else []
        if there != [spec.name for spec in specs[: len(there)]]:
            raise InvalidValue(
                f"{place} already has other virtual cards than {gpus} ({', '.join(there)}). "
                "Name the same ones, another folder, or remove that one."
            )
        for index, spec in enumerate(specs[len(there) :], len(there)):
            about = {"uuid": f"GPU-{uuid.uuid4()}", "index": index, "name": spec.name, "total": spec.usable}
            _write_new(place / f"card-{index}", about)
        return cls.open(place)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Self:
        place = Path(folder)
        files = _files(place)
        if not files:
            raise InvalidValue(f"{place} must be a folder of virtual cards; it has none")
        return cls(place, sorted((_read_card(file) for file in files), key=lambda card: card.index))

    def card(self, uuid: str) -> Card:
        for card in self.cards:
            if card.uuid == uuid:
                return card
        raise InvalidValue(f"{self.folder} has no card with the UUID {uuid!r}")

    def visible(self, text: str | None) -> list[Card]:
        """Return the cards that `CUDA_VISIBLE_DEVICES` makes visible, as CUDA reads it: indices and UUIDs, or their
        beginnings, up to the first that matches no card."""
        if text is None:
            return list(self.cards)
        seen: list[Card] = []
        for word in text.split(","):
            card = _named(self.cards, word.strip())
            if card is None or card in seen:
                break
            seen.append(card)
        return seen


def environment(
    folder: str | os.PathLike[str], uuids: Sequence[str], base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment variables for a Python process to train on these cards, added to those in `base`."""
    paths = (os.environ if base is None else base).get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in paths if path and path != str(STARTUP)]
    return {
        VARIABLE: os.path.abspath(folder),
        "CUDA_VISIBLE_DEVICES": ",".join(uuids),
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *others]),
    }


def _named(cards: Sequence[Card], word: str) -> Card | None:
    if word.isascii() and word.isdigit():
        return next((card for card in cards if card.index == int(word)), None)
    fits = [card for card in cards if word.startswith("GPU-") and card.uuid.startswith(word)]
    return fits[0] if len(fits) == 1 else None


# The file of a card.


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [file for file in folder.glob("card-*") if file.name.removeprefix("card-").isdigit()]


def _write_new(path: Path, about: dict[str, Any]) -> None:
    header = json.dumps(about).encode().ljust(_HEADER - 1) + b"\n"
    if len(header) > _HEADER:
        raise InvalidValue(f"name of a virtual card must be shorter, got {about['name']!r}")
    made = path.with_name(f"new-{path.name}-{os.getpid()}")
    try:
        made.write_bytes(header + _EMPTY * _SPARE)
    except OSError:
        made.unlink(missing_ok=True)
        raise
    if os.geteuid() == 0:
        made.chmod(0o666)  # jobs of other users write their lines; only root can replace the file
    made.replace(path)


def _read_card(path: Path) -> Card:
    with _locked(path, for_writing=False) as file:
        try:
            about = json.loads(os.pread(file, _HEADER, 0))
            card = Card(str(about["uuid"]), int(about["index"]), str(about["name"]), int(about["total"]), path)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidValue(f"{path} is not the file of a virtual card, or is damaged: {error!r}") from error
    return card


@contextmanager
def _locked(path: Path, for_writing: bool = True) -> Iterator[int]:
    with _one_at_a_time:
        try:
            file = os.open(path, (os.O_RDWR if for_writing else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidValue(f"the virtual card {path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX if for_writing else fcntl.LOCK_SH)
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


def _read_table(file: int, path: Path) -> dict[int, _Line]:
    """Return the lines in use, by their place in the file."""
    content = os.pread(file, _LARGEST_FILE, _HEADER)
    table = {}
    for place in range(len(content) // _LINE):
        line = content[place * _LINE : (place + 1) * _LINE]
        if line == _EMPTY:
            continue
        try:
            pid, start, taken, *activity = (int(word) for word in line.split())
            declared = DeclaredActivity(*(share / 1000 for share in activity)) if activity else None
        except (ValueError, TypeError) as error:
            raise InvalidValue(f"line {place + 2} of the virtual card {path} is damaged: {line!r}") from error
        table[place] = _Line(Process(pid, start), taken, declared)
    return table


def _without_dead(file: int, table: dict[int, _Line]) -> dict[int, _Line]:
    for place, line in list(table.items()):
        if not is_alive(line.process):
            _write_line(file, place, None)
            del table[place]
    return table


def _change(file: int, table: dict[int, _Line], owner: Process, change: int) -> None:
    place = next((place for place, line in table.items() if line.process == owner), None)
    if place is None:
        place = next(number for number in range(len(table) + 1) if number not in table)
    line = table.get(place, _Line(owner, 0))
    left = line.taken + change
    _write_line(file, place, line._replace(taken=left) if left else None)


def _write_line(file: int, place: int, line: _Line | None) -> None:
    content = _EMPTY
    if line is not None:
        shares = [round(1000 * share) for share in line.activity or ()]
        words = " ".join(map(str, (*line.process, line.taken, *shares)))
        content = words.encode().ljust(_LINE - 1) + b"\n"
    os.pwrite(file, content, _HEADER + place * _LINE)
