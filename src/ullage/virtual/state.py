"""The state of one virtual GPU: everything that its parts read or change. They import this module and never `gpu.py`,
which combines them."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.allocator import NO_LIMIT, AllocatorConfig, CachingAllocator
from ullage.errors import UnsupportedOperation
from ullage.hardware import GPU
from ullage.text import plain
from ullage.virtual.call.native import storage_of
from ullage.virtual.distributed.ordering import Communication
from ullage.virtual.memory.allocations import ACTIVATIONS, KINDS, PARAMETERS, live_by_kind
from ullage.virtual.memory.deferred_cpu import Host
from ullage.virtual.memory.libraries import CODE, Libraries
from ullage.virtual.memory.tensors import DeviceMemory
from ullage.virtual.releases import followed
from ullage.virtual.shared_card.process import SharedCard
from ullage.virtual.upper_bound import ASSUMED, LEFT_OUT, Uncertainty, meanings_of
from ullage.virtual.values.assumed_sizes import AssumedSizes
from ullage.virtual.values.known_values import KnownValues
from ullage.virtual.watching.step_calls import OperatorCalls

_NAMES_SHOWN = 8  # names in a note
_Part = TypeVar("_Part")


class Stopwatch:
    """Adds up the time inside `running()`; nested uses count once."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        since = self._since
        return self._before if since is None else self._before + time.monotonic() - since

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if self._since is not None:
            yield
            return
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._before, self._since = self.seconds, None


class GPUState:
    """Memory, known values, loaded libraries and notes of one virtual GPU."""

    mode: TorchDispatchMode  # counts operators, also those that handlers call inside it; set by `VirtualGPU`

    def __init__(
        self, spec: GPU, config: AllocatorConfig | None = None, limited: bool = True, shared: SharedCard | None = None
    ) -> None:
        self.spec, self.shared = spec, shared
        self.release = followed(torch.__version__, runs_on_gpus=torch.version.cuda is not None)
        self.config = config or AllocatorConfig.from_environment()
        self.context = max(0, (spec.context or 0) - sum(CODE.values()))  # grows as libraries are loaded
        self._total = spec.usable if limited else NO_LIMIT
        if shared is not None:
            shared.take_context(self.context)
        self.memory = DeviceMemory(self._allocator(), self.context, spec.usable, keeps_history=shared is None)
        self.host = Host()
        self.values = KnownValues(self.memory, self.host, self.note)
        self.environment = dict(os.environ)
        self.libraries = Libraries(
            spec, self.release, self.memory, self.environment, self.take_outside, self.note, self.free_on_card
        )
        self.operator = ""  # the running one
        self.doing: Callable[[str], None] = lambda what: None  # gets each long operation, and "" when it is done
        self.compiling = Stopwatch()  # of PyTorch's compiler
        self.calls = OperatorCalls()
        self.communication = Communication(self.calls)
        self.assumed_sizes = AssumedSizes()
        self.other_layouts = False  # whether there was a sparse tensor
        self.refused: str | None = None  # the last refusal; code may have caught the exception
        self.uncertainty = Uncertainty()
        self.attention_kernels: set[str] = set()  # that `scaled_dot_product_attention` used
        self._notes: dict[tuple[str, str], int] = {}
        self._names: dict[tuple[str, str], list[str]] = {}  # that a note lists
        self._peaks_at_reset = self._needs_at_reset = 0, 0
        self._parts: dict[type[Any], object] = {}

    def add_part(self, part: object) -> None:
        self._parts[type(part)] = part

    def part(self, kind: type[_Part]) -> _Part | None:
        return cast("_Part | None", self._parts.get(kind))

    def _allocator(self) -> CachingAllocator:
        room = self._total - self.context
        return CachingAllocator(room, self.config, total_memory=self._total, driver=self.shared)

    def configure(self, config: AllocatorConfig) -> None:
        """Change the allocator's settings unless it is in use: PyTorch reads them at the first request."""
        if not self.memory.clock:
            self.config = config
            self.memory.allocator = self._allocator()

    @property
    def peak_allocated(self) -> int:
        """The most bytes that tensors held at once, as `torch.cuda.max_memory_allocated()`."""
        return max(self._peaks_at_reset[0], self.needed_allocated, self.memory.tried[0])

    @property
    def peak_reserved(self) -> int:
        """The most bytes that the allocator held at once, as `torch.cuda.max_memory_reserved()`."""
        return max(self._peaks_at_reset[1], self.needed_reserved, self.memory.tried[1])

    @property
    def needed_allocated(self) -> int:
        """The most bytes that tensors held at once, without workspaces that `cudnn.benchmark` only tried."""
        return max(self._needs_at_reset[0], self.memory.allocator.peak_allocated)

    @property
    def needed_reserved(self) -> int:
        """The most bytes that the allocator held at once, without workspaces that `cudnn.benchmark` only tried."""
        return max(self._needs_at_reset[1], self.memory.allocator.peak_reserved)

    def reset_peaks(self) -> None:
        """Reset PyTorch's peaks, and remember those of the run so far."""
        self._peaks_at_reset = self.peak_allocated, self.peak_reserved
        self._needs_at_reset = self.needed_allocated, self.needed_reserved
        self.memory.tried = 0, 0
        self.memory.allocator.reset_peak_stats()

    @property
    def notes(self) -> list[str]:
        """Every assumption of the run, in the order of its first use."""
        return [text + (f" ({count} times)" if count > 1 else "") for (_, text), count in list(self._notes.items())]

    @property
    def noted(self) -> list[tuple[str, str]]:
        return list(self._notes)

    @property
    def assumed(self) -> list[dict[str, Any]]:
        """Assumptions about the code or its data; see `Estimate.assumed`."""
        return self._meanings(ASSUMED)

    @property
    def left_out(self) -> list[dict[str, Any]]:
        """Parts of the code that the run did not follow; see `Estimate.left_out`."""
        return self._meanings(LEFT_OUT)

    def _meanings(self, group: str) -> list[dict[str, Any]]:
        activations = live_by_kind(self.memory.spans, self.memory.peak_clock)[KINDS[ACTIVATIONS]]
        cached = self.peak_reserved - self.peak_allocated
        others = self.libraries.of_connections
        return meanings_of(dict(self._notes), group, self.peak_reserved, activations, others, cached)

    def note(self, kind: str, text: str) -> None:
        """Add a line to the notes, which count repeated lines; `upper_bound.py` defines the kinds of notes."""
        text = plain(text)  # it may quote the script
        self._notes[kind, text] = self._notes.get((kind, text), 0) + 1

    def note_name(self, kind: str, text: str, name: str) -> None:
        """Add a name to the note `text`, whose `{names}` lists all of them."""
        names = self._names.setdefault((kind, text), [])
        if name not in names:
            self._notes.pop((kind, text.format(names=_few(names))), None)
            names.append(name)
            self.note(kind, text.format(names=_few(names)))

    def note_instead(self, kind: str, text: str) -> None:
        for key in [key for key in self._notes if key[0] == kind]:
            del self._notes[key]
        self.note(kind, text)

    def refusing(self, what: str, advice: str) -> Callable[..., NoReturn]:
        return lambda *args, **options: self.refuse(what, advice)

    def refuse(self, what: str, advice: str) -> NoReturn:
        """Raise `UnsupportedOperation` for something that the virtual GPU cannot follow."""
        self.refused = f"the virtual GPU cannot follow {what}: {advice}"
        raise UnsupportedOperation(self.refused)

    def wait(self, stream: int | None = None, until: tuple[int | None, float | None] = (None, None)) -> None:
        """Let the host wait for the GPU, for one stream, or for its work up to a moment."""
        self.communication.host_waits(stream)
        self.calls.add_values("cuda.synchronize")
        since, done = until
        clock = self.calls.launch_clock
        if clock is not None:
            clock.wait(clock.done(stream) if done is None else done)
        self.memory.waiting.synchronized(stream, since)

    def take_outside(self, size: int) -> None:
        """Take memory of the card outside PyTorch's allocator, for the code of a library."""
        if self.spec.context:
            if self.shared is not None:
                self.shared.take_context(size)
            self.context += size
            self.memory.context = self.context
            self.memory.allocator.capacity -= size

    def free_on_card(self) -> int:
        """Return the free bytes of the card, as in `torch.cuda.mem_get_info()`."""
        if self.shared is not None:
            return self.shared.free()
        return max(0, self.memory.total - self.memory.context - self.memory.allocator.reserved)

    def mark_parameter(self, tensor: torch.Tensor) -> None:
        self.memory.mark(tensor, PARAMETERS)

    def pin(self, tensor: torch.Tensor) -> None:
        storage_of(tensor).ullage_pinned = True

    def pinned(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_cuda and getattr(storage_of(tensor), "ullage_pinned", False)


gpus_in_use: list[GPUState] = []  # those whose `with` statement is running, the innermost last


def part_in_use(kind: type[_Part]) -> _Part:
    part = gpus_in_use[-1].part(kind)
    assert part is not None
    return part


def _few(names: list[str]) -> str:
    """
    >>> _few([str(number) for number in range(12)])
    '0, 1, 2, 3, 4, 5, 6, 7 and 4 others'
    """
    others = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {others} other{'s' if others > 1 else ''}" if others > 0 else "")
