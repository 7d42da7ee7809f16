"""All requests of a run to its virtual GPU: each block with its lifetime, kind, operator and module; and every event.

A trace consists of arrays, so that a run of a million requests stays small and can be sent to another process. The
timeline page and the memory snapshot are drawn from it.
"""

import io
import json
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.errors import InvalidValue
from ullage.virtual import VirtualGPU
from ullage.virtual.memory.allocations import KINDS
from ullage.virtual.watching.step_calls import PASSES

Array = npt.NDArray[Any]

_ARRAYS = ("begin", "end", "size", "kind", "place", "owner", "places", "steps", "reserved", "events", "peaks")
_OTHERS = ("context", "allocator_settings", "expandable", "operators", "modules", "classes")


class Trace:
    """The requests of one run. Pass an empty one to `estimate`, which fills it when the run has ended.

    Blocks, one entry each: `begin` and `end` in allocator calls (`end` is -1 for a block that was never freed),
    `size` in bytes, `kind` (a place in `Trace.kinds`), `place` (a row of `places`: operator, module and pass, each a
    place in `operators`, `modules`, `Trace.passes`), `owner` (the module of a parameter, gradient or state; -1 for
    others). `steps` are the calls at which optimizer steps ended, `reserved` pairs of call and bytes, `events` every
    event of the allocator (action, address, size, the block that it begins or -1 in a repetition), `peaks` the calls
    of the highest allocated and reserved memory.
    """

    kinds = KINDS
    passes = PASSES

    def __init__(self) -> None:
        self.context = 0
        self.allocator_settings = ""
        self.expandable = False
        self.operators: list[str] = []
        self.modules: list[str | None] = []
        self.classes: list[str | None] = []  # of the modules
        self._events = array("q")

    def __getattr__(self, name: str) -> Array:
        if name in _ARRAYS:
            raise InvalidValue("this trace is empty; pass it to ullage.estimate(..., trace=trace) first")
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(self.begin)

    def watch(self, card: VirtualGPU) -> None:
        """Record the events of a run that is about to begin."""
        self._events = events = array("q")
        card.origins.follow_owners = True

        memory = card.memory

        def note(action: int, address: int, size: int) -> None:
            events.extend((action, address, size, -1 if memory.repeating else len(memory.spans)))

        card.memory.allocator.on_event = note

    def fill(self, card: VirtualGPU) -> None:
        memory, table = card.memory, card.origins.table()
        operators = {operator: number for number, operator in enumerate(dict.fromkeys(row[0] for row in table))}
        self.context = card.context
        self.allocator_settings = card.environment.get("PYTORCH_ALLOC_CONF", "")
        self.expandable = card.config.expandable_segments
        self.operators, self.modules = list(operators), card.origins.module_names()
        self.classes = list(card.origins.classes)
        spans, owners = memory.spans, card.origins.owners
        self.begin = np.array([span.begin for span in spans], np.int64)
        self.end = np.array([span.end for span in spans], np.int64)
        self.size = np.array([span.size for span in spans], np.int64)
        self.kind = np.array([span.kind for span in spans], np.int8)
        self.place = np.array([span.origin for span in spans], np.int32)
        self.owner = np.array([owners.get(index, -1) for index in range(len(spans))], np.int32)
        self.places = np.array([(operators[name], module, part) for name, module, part in table], np.int32)
        self.steps = np.array(card.progress.ends, np.int64)
        self.reserved = np.array(memory.reserved_at, np.int64).reshape(-1, 2)
        events = np.array(self._events, np.int64).reshape(-1, 4)
        of_run = np.flatnonzero(events[:, 3] >= 0)  # those after the last repeat an iteration: the allocator settles
        self.events = events[: of_run[-1] + 1] if len(of_run) else events[:0]
        self.peaks = np.array([memory.peak_clock, memory.peak_reserved_clock], np.int64)

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        about = json.dumps({name: getattr(self, name) for name in _OTHERS})
        np.savez_compressed(file, about=np.array(about), **arrays)
        return file.getvalue()

    def read(self, content: bytes) -> None:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            values = {name: file[name] for name in _ARRAYS} | json.loads(str(file["about"]))
        vars(self).update(values)
