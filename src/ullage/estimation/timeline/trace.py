"""Everything a run asked of its virtual GPU: each block with its life, kind, operator and module; and every event.

A trace is a handful of arrays, so that a run of a million requests stays small, can be saved to one file and carried
from one process to another. The timeline page and the memory snapshot are drawn from it.
"""

from __future__ import annotations

import io
import json
import zipfile
from array import array
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ullage.errors import InvalidValue
from ullage.virtual import VirtualGPU
from ullage.virtual.memory.allocations import KINDS
from ullage.virtual.watching.step_calls import PASSES

Array = npt.NDArray[Any]

_ARRAYS = ("begin", "end", "size", "kind", "place", "owner", "places", "steps", "reserved", "events", "peaks")


class Trace:
    """The requests of one run. Hand an empty one to `estimate`; it is filled when the run has ended.

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
        self.gpu: str | None = None
        self.capacity: int | None = None
        self.context = 0
        self.allocator_settings = ""
        self.expandable = False
        self.operators: list[str] = []
        self.modules: list[str | None] = []
        self.classes: list[str | None] = []  # of the modules
        self._values: dict[str, Array] = {}
        self._events = array("q")

    def __getattr__(self, name: str) -> Array:
        values = self.__dict__.get("_values", {})
        if name in values:
            found: Array = values[name]
            return found
        if name in _ARRAYS:
            raise InvalidValue("this trace is empty; hand it to ullage.estimate(..., trace=trace) first")
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(self._values.get("begin", ()))

    def operator(self, place: int) -> str:
        """The operator of a place."""
        return self.operators[int(self.places[place][0])]

    def module(self, place: int) -> str | None:
        """The module of a place; `None` outside of any module."""
        return self.modules[int(self.places[place][1])]

    def watch(self, card: VirtualGPU) -> None:
        """Follow a run that is about to begin; what was followed before is forgotten."""
        self._events = events = array("q")
        card.origins.follow_owners = True

        memory = card.memory

        def note(action: int, address: int, size: int) -> None:
            events.extend((action, address, size, -1 if memory.repeating else len(memory.spans)))

        card.memory.allocator.on_event = note

    def fill(self, card: VirtualGPU) -> None:
        """Take over what a finished run did."""
        memory, table = card.memory, card.origins.table()
        operators = {operator: number for number, operator in enumerate(dict.fromkeys(row[0] for row in table))}
        self.gpu, self.capacity, self.context = card.spec.name, card.spec.usable, card.context
        self.allocator_settings = card.environment.get("PYTORCH_ALLOC_CONF", "")
        self.expandable = card.config.expandable_segments
        self.operators, self.modules = list(operators), card.origins.module_names()
        self.classes = list(card.origins.classes)
        spans, owners = memory.spans, card.origins.owners
        self._values = {
            "begin": np.array([span.begin for span in spans], np.int64),
            "end": np.array([span.end for span in spans], np.int64),
            "size": np.array([span.size for span in spans], np.int64),
            "kind": np.array([span.kind for span in spans], np.int8),
            "place": np.array([span.origin for span in spans], np.int32),
            "owner": np.array([owners.get(index, -1) for index in range(len(spans))], np.int32),
            "places": np.array([(operators[name], module, part) for name, module, part in table], np.int32),
            "steps": np.array(card.progress.ends, np.int64),
            "reserved": np.array(memory.reserved_at, np.int64).reshape(-1, 2),
            "events": _without_last_repetitions(np.array(self._events, np.int64).reshape(-1, 4)),
            "peaks": np.array([memory.peak_clock, memory.peak_reserved_clock], np.int64),
        }

    def save(self, path: str | Path) -> None:
        """Write the trace to one file (compressed NumPy arrays)."""
        try:
            Path(path).write_bytes(self.to_bytes())
        except OSError as error:
            raise InvalidValue(f"cannot write the trace to {path}: {error.strerror}") from None

    def to_bytes(self) -> bytes:
        """The content of such a file."""
        about = {
            "gpu": self.gpu,
            "capacity": self.capacity,
            "context": self.context,
            "operators": self.operators,
            "modules": self.modules,
            "classes": self.classes,
            "allocator_settings": self.allocator_settings,
            "expandable": self.expandable,
        }
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        file = io.BytesIO()
        np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)
        return file.getvalue()

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """A trace that `save` wrote."""
        trace = cls()
        trace.read(path)
        return trace

    def read(self, path: str | Path | BinaryIO) -> None:
        """Fill this trace from a file that `save` wrote, or an open one."""
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                self._values = {name: file[name] for name in _ARRAYS}
        except OSError as error:
            raise InvalidValue(f"cannot read the trace {path}: {error.strerror or error}") from None
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
            raise InvalidValue(f"{path} is no trace; needed a file that Trace.save wrote") from None
        for name, value in about.items():
            setattr(self, name, value)


def _without_last_repetitions(events: Array) -> Array:
    """Repeating the last iteration to let the allocator settle adds events that no request of the run stands behind."""
    of_run = np.flatnonzero(events[:, 3] >= 0)
    return events[: of_run[-1] + 1] if len(of_run) else events[:0]
