"""The answer: one object whose `str` is the report and whose attributes are the JSON keys."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, field, fields
from html import escape
from typing import Any

from ullage.errors import InvalidValue
from ullage.units import format_bytes, format_duration

PROCESS = "process_memory"
SCHEMA_VERSION = 1  # goes up when a JSON key changes its meaning or goes away; new keys leave it (docs/json.md)

BREAKDOWN_WORDS = {
    "parameters": "weights and buffers moved with them",
    "gradients": "gradients of the weights",
    "optimizer": "the optimizer's state and its temporaries",
    "activations": "inputs, activations and temporaries",
    "workspace": "kept by cuBLAS",
    "fragmentation": "reserved by the allocator beyond what is in use",
    "context": "CUDA context, libraries and kernels",
}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a job will take on one GPU; all sizes are bytes.

    `peak_allocated` and `peak_reserved` are what `torch.cuda.max_memory_allocated()` and `..._reserved()` would say,
    `process_memory` is what nvidia-smi shows for the process, `upper` the bound for `process_memory` that placement
    uses. `breakdown` sums up to `process_memory`. `out_of_memory` is PyTorch's message if the job does not fit.

    `peak_operator`, `peak_module`, `peak_pass` and `peak_step` say when the most was allocated, `reserved_...` when
    the allocator last took more from the card. `doubtful` is by how much the least certain kernel's temporary could
    be larger, `measured` whether this very GPU was measured. docs/json.md explains every key.

    `estimator` names who made the estimate. Others than Ullage know less: what they do not know is `None`. `figure` is
    the one figure that the estimator stands for; `figure_kind` says what it is to be compared with: "allocated",
    "reserved" or "process" memory.

    >>> import ullage
    >>> ullage.estimate(train, gpu="H200").peak_reserved      # doctest: +SKIP
    92274688
    """

    gpu: str
    gpu_memory: int
    peak_allocated: int | None
    peak_reserved: int | None
    process_memory: int | None
    upper: int | None
    breakdown: dict[str, int]
    fits: bool
    headroom: int
    steps: int
    seconds: float
    out_of_memory: str | None = None
    source: str | None = None
    peak_operator: str | None = None
    peak_module: str | None = None
    peak_pass: str | None = None
    peak_step: int | None = None
    reserved_operator: str | None = None
    reserved_module: str | None = None
    reserved_pass: str | None = None
    reserved_step: int | None = None
    phases: dict[str, int] = field(default_factory=dict)
    doubtful: int | None = None
    measured: bool | None = None
    computed_on: str | None = None
    notes: list[str] = field(default_factory=list)
    timeline: list[tuple[int, int, int]] = field(default_factory=list, repr=False)
    estimator: str = "ullage"
    figure_kind: str = "process"
    schema_version: int = SCHEMA_VERSION

    @property
    def figure(self) -> int:
        """The memory that the estimator stands for: its allocated, reserved or process memory, by `figure_kind`."""
        return self._known({"allocated": "peak_allocated", "reserved": "peak_reserved"}.get(self.figure_kind, PROCESS))

    @property
    def bound(self) -> int:
        """The most to expect: `upper`, or the figure itself where the estimator gives no bound."""
        return self.figure if self.upper is None else self.upper

    @property
    def peaks(self) -> tuple[int, int]:
        """Allocated and reserved memory, for who needs both; refused where the estimator does not know one of them."""
        return self._known("peak_allocated"), self._known("peak_reserved")

    def _known(self, name: str) -> int:
        value: int | None = getattr(self, name)
        if value is None:
            raise InvalidValue(f"the estimator {self.estimator} does not tell {name}; needed an estimate that does")
        return value

    def to_dict(self, timeline: bool = True) -> dict[str, Any]:
        """The attributes as plain values."""
        names = [name for name in self.__dataclass_fields__ if timeline or name != "timeline"]
        return {name: getattr(self, name) for name in names}

    def to_json(self, timeline: bool = True, indent: int | None = None) -> str:
        """The attributes as JSON; the keys are the attributes' names."""
        return json.dumps(self.to_dict(timeline), indent=indent)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Estimate:
        """An estimate from what `to_dict` or `to_json` gave; keys of later versions that are not known are left out.

        >>> e = Estimate.from_dict(json.loads(text))      # doctest: +SKIP
        """
        if not isinstance(values, dict):
            raise InvalidValue(f"needed an estimate's dictionary; found {type(values).__name__}")
        known = {spec.name: values[spec.name] for spec in fields(cls) if spec.name in values}
        needed = [spec.name for spec in fields(cls) if spec.default is MISSING and spec.default_factory is MISSING]
        missing = [name for name in needed if name not in known]
        if missing:
            raise InvalidValue(f"this is no estimate: {', '.join(missing)} missing")
        version = known.get("schema_version", SCHEMA_VERSION)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise InvalidValue(
                f"needed an estimate of schema version {SCHEMA_VERSION} or lower; found {version!r}. "
                "It was written by a newer Ullage: pip install --upgrade ullage"
            )
        known["timeline"] = [tuple(point) for point in known.get("timeline", [])]
        return cls(**known | {"schema_version": SCHEMA_VERSION})

    @property
    def verdict(self) -> str:
        """The answer in one line, such as "fits on A100-40GB: 14.2 of 39.5 GiB, 25.3 GiB of room"."""
        if self.fits:
            room = format_bytes(self.headroom)
            return f"fits on {self.gpu}: {_pair(self.figure, self.gpu_memory)}, {room} of room"
        over = f", {format_bytes(-self.headroom)} too much" if self.headroom < 0 else ""
        takes, has = format_bytes(self.figure), format_bytes(self.gpu_memory)
        return f"DOES NOT FIT on {self.gpu}: takes {takes} where {has} can be had{over}"

    @property
    def peak_words(self) -> str | None:
        """When the most was allocated, in words; `None` if it is not known."""
        return moment(self.peak_operator, self.peak_module, self.peak_pass, self.peak_step)

    @property
    def reserved_words(self) -> str | None:
        """When the allocator last took more from the card, in words; `None` if it is not known."""
        return moment(self.reserved_operator, self.reserved_module, self.reserved_pass, self.reserved_step)

    @property
    def tight(self) -> bool:
        """Whether the job fits by the estimate but not by its upper bound."""
        return self.fits and self.bound > self.gpu_memory

    @property
    def certainty(self) -> str:
        """How sure the figure is, and why, in a sentence."""
        if self.upper is None:
            return f"the estimator {self.estimator} gives no bound"
        most = f"at most {format_bytes(self.upper)}" + (", more than the GPU has" if self.tight else "")
        if self.measured is None:
            return most
        if not self.measured:
            return f"{most}: {self.gpu} was not measured, its kernels follow the rules of its generation"
        if self.doubtful:
            return f"{most}: the choice of some kernels is doubtful, one by up to {format_bytes(self.doubtful)}"
        return f"{most}: the memory of every kernel is known, measured on {self.gpu}"

    @property
    def effort(self) -> str:
        """What was done for the estimate, and how long it took."""
        took = f"in {format_duration(self.seconds)}, without a GPU"
        if self.estimator == "ullage":
            return f"{self.steps} optimizer steps followed {took}"
        return f"estimated by {self.estimator} {took}"

    def __str__(self) -> str:
        most = "" if self.upper is None else f" (at most {format_bytes(self.upper)})"
        figures = [
            (self.process_memory, f"as nvidia-smi shows it, at the peak{most}"),
            (self.peak_reserved, "torch.cuda.max_memory_reserved()"),
            (self.peak_allocated, "torch.cuda.max_memory_allocated()"),
        ]
        lines = [self.verdict, ""]
        lines += [f"  {format_bytes(size):>10}  {words}" for size, words in figures if size is not None]
        lines += ["", "Of that, at the peak:"] if self.breakdown else []
        total = max(1, self.figure)
        for name, size in self.breakdown.items():
            bar = "█" * round(30 * size / total)
            lines.append(f"  {format_bytes(size):>10}  {name:<13} {bar:<30} {BREAKDOWN_WORDS[name]}")
        if self.peak_words:
            lines += ["", f"The peak is reached {self.peak_words}."]
        lines += ["", f"{self.effort[:1].upper()}{self.effort[1:]}."]
        if self.out_of_memory and not self.fits:
            lines += ["", "PyTorch would stop with:", f"  {self.out_of_memory.split(' If reserved')[0]}"]
        if self.notes:
            lines += ["", "Assumed on the way:"] + [f"  - {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The report as a notebook shows it."""

        return card(self)


def moment(operator: str | None, module: str | None, part: str | None, step: int | None) -> str | None:
    """Where a request came from, in words.

    >>> moment("aten.convolution_backward.default", "layer3.4.conv2", "backward", 2)
    'in the backward pass of layer3.4.conv2, step 2 (convolution_backward)'
    """
    if operator is None or part is None:
        return None
    places = {
        "forward": f"in the forward pass of {module}",
        "backward": f"in the backward pass of {module}" if module else "in the backward pass",
        "optimizer": f"in {module}",
        "outside": "outside of the model",
    }
    short = operator.removeprefix("aten.").removesuffix(".default")
    return places[part] + (f", step {step}" if step is not None else "") + (f" ({short})" if short else "")


def _pair(used: int, of: int) -> str:
    """Two sizes; a unit that both share is said once.

    >>> _pair(3 * 2**30, 8 * 2**30), _pair(2**20, 2**30)
    ('3.00 of 8.00 GiB', '1.00 MiB of 1.00 GiB')
    """
    first, second = format_bytes(used), format_bytes(of)
    number, unit = first.split()
    return f"{number if second.endswith(unit) else first} of {second}"


# The colour of each part of the breakdown: the same in the terminal, in a notebook and on the timeline page.

BREAKDOWN_COLOURS = {
    "parameters": "#3b7dd8",
    "gradients": "#2fa36b",
    "optimizer": "#e8a33d",
    "activations": "#8e6bd1",
    "workspace": "#d1637d",
    "fragmentation": "#a3adba",
    "context": "#6f7c8e",
}


# An estimate as a notebook shows it: one card of HTML that brings its own style and needs nothing else.


def card(estimate: Estimate) -> str:
    """The card. Colours of the text are the notebook's own, so that it fits light and dark ones."""
    good = estimate.fits
    colour, word = ("#1a7f4b", "✓") if good else ("#c9372c", "✗")
    parts = [
        '<div style="max-width:760px;border:1px solid #8884;border-radius:10px;padding:12px 16px;line-height:1.45">',
        f"<div><b>{escape(estimate.source)}</b></div>" if estimate.source else "",
        f'<div style="font-weight:600;font-size:1.1em;color:{colour}">{word} {escape(estimate.verdict)}</div>',
        _bar(estimate),
        _table(estimate),
        f"<div>The peak is reached {escape(estimate.peak_words)}.</div>" if estimate.peak_words else "",
        f'<div style="opacity:.75">{escape(estimate.certainty[:1].upper() + estimate.certainty[1:])}. ',
        f"{escape(estimate.effort[:1].upper() + estimate.effort[1:])}.</div>",
        _notes(estimate),
        "</div>",
    ]
    return "".join(parts)


def _bar(estimate: Estimate) -> str:
    whole = max(estimate.gpu_memory, estimate.figure, 1)
    pieces = [
        f'<div title="{name}: {format_bytes(size)}" style="width:{100 * size / whole:.2f}%;'
        f'background:{BREAKDOWN_COLOURS[name]}"></div>'
        for name, size in estimate.breakdown.items()
        if size > 0
    ]
    style = "display:flex;height:14px;border-radius:7px;overflow:hidden;background:#8883;margin:8px 0"
    return f'<div style="{style}">{"".join(pieces)}</div>'


def _table(estimate: Estimate) -> str:
    rows = []
    for name, size in estimate.breakdown.items():
        swatch = f'<span style="color:{BREAKDOWN_COLOURS[name]}">■</span>'
        cell = "padding:1px 14px 1px 0;text-align:left;background:none"
        rows.append(
            f'<tr style="background:none"><td style="{cell}">{swatch} {name}</td>'
            f'<td style="{cell};text-align:right;font-variant-numeric:tabular-nums">{format_bytes(size)}</td>'
            f'<td style="{cell};opacity:.75">{BREAKDOWN_WORDS[name]}</td></tr>'
        )
    return f'<table style="border:0;border-collapse:collapse;margin:4px 0 8px">{"".join(rows)}</table>'


def _notes(estimate: Estimate) -> str:
    if not estimate.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in estimate.notes)
    return f"<details><summary>{len(estimate.notes)} assumptions</summary><ul>{items}</ul></details>"
