"""The first request in which a virtual run differs from a recorded one, with its operator and module."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.allocator import History
from ullage.hardware import gpu as find_gpu
from ullage.virtual import VirtualGPU
from ullage.virtual.watching.step_calls import PASSES

ALLOC, FREE = 0, 2  # actions of a history; a free counts when it is completed


@dataclass(frozen=True, slots=True)
class Request:
    """One request or free: its size and, on the virtual GPU, where it comes from."""

    action: int
    size: int
    operator: str = ""
    where: str = ""

    def __str__(self) -> str:
        return f"{'take' if self.action == ALLOC else 'free'} {self.size:,} B"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two runs differ; `None` on the side that has ended."""

    index: int
    recorded: list[Request]
    virtual: list[Request]
    begin: int

    def __str__(self) -> str:
        lines = [f"first difference at request {self.index:,}"]
        for offset in range(max(len(self.recorded), len(self.virtual))):
            real = str(self.recorded[offset]) if offset < len(self.recorded) else "(ended)"
            mine = self.virtual[offset] if offset < len(self.virtual) else None
            mark = "->" if self.begin + offset == self.index else "  "
            shown = f"{mine!s:>24}   {mine.operator} {mine.where}" if mine else "(ended)"
            lines.append(f"{mark} {self.begin + offset:>8,}  {real:>24} | {shown}")
        return "\n".join(lines)


def recorded_requests(file: Path) -> list[Request]:
    """Return the requests and frees of a recorded history, in order."""
    history = History.load(file)
    sizes: dict[int, int] = {}
    requests = []
    for action, address, size in zip(history.action, history.addr, history.size, strict=True):
        if action == ALLOC:
            sizes[address] = size
            requests.append(Request(ALLOC, size))
        elif action == FREE:
            requests.append(Request(FREE, sizes[address]))
    return requests


def virtual_requests(function: Callable[[], Any], gpu: str = "H200") -> list[Request]:
    """Return the requests of a function on a virtual GPU, each with its operator, module and pass."""
    events: list[tuple[int, int, int]] = []
    sizes: dict[int, int] = {}
    card = VirtualGPU(find_gpu(gpu))

    def note(action: int, address: int, size: int) -> None:
        if action == ALLOC:
            sizes[address] = size
        if action in (ALLOC, FREE):
            events.append((action, sizes[address], card.origins.current()))

    with card:
        card.memory.allocator.on_event = note
        function()
    table, modules = card.origins.table(), card.origins.module_names()
    places = [(operator, f"in {modules[module] or 'no module'} ({PASSES[part]})") for operator, module, part in table]
    return [Request(action, size, *places[place]) for action, size, place in events]


def first_difference(recorded: list[Request], virtual: list[Request], around: int = 6) -> Difference | None:
    """Return the first request that differs, with some before and after it; `None` if the runs are the same."""
    pairs = zip(recorded, virtual, strict=False)
    differ = (place for place, (a, b) in enumerate(pairs) if (a.action, a.size) != (b.action, b.size))
    index = next(differ, min(len(recorded), len(virtual)))
    if index == len(recorded) and all(request.action == FREE for request in virtual[index:]):
        return None  # the recording stopped before the program freed everything
    begin = max(0, index - around)
    return Difference(index, recorded[begin : index + around], virtual[begin : index + around], begin)
