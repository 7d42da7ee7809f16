"""`Estimate`: the result of an estimate. Its attributes are the JSON keys, and `print` shows it as text."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from ullage.errors import UPDATE, InvalidValue
from ullage.estimation.words import AT_THEIR_MAXIMUM, BREAKDOWN_WORDS, listed, moment, used_of
from ullage.hardware import GPU, default_gpu_note
from ullage.performance.cost import Training, TrainingCost
from ullage.performance.result import Utilization, known_fields
from ullage.performance.step import StepCalls
from ullage.text import AFTER_THE_TIME
from ullage.units import format_bytes, format_duration
from ullage.virtual.releases import MEASURED, MEASURED_CUDNN

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

PROCESS = "process_memory"
MIN_REPORTED_SHARE = 0.01  # of the memory, for a remark
# It goes up when a JSON key changes its meaning or goes away; new keys leave it (docs/reference/json.md).
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of a job on one GPU. `print` shows it as a report.

    All sizes are bytes, and unknown values are `None`. The [JSON reference](json.md) explains each attribute; the most
    important ones are:

    - `fits`, `headroom`: whether the job fits, and the memory left; `None` from an estimator of `activity` alone.
    - `process_memory`: the memory that nvidia-smi shows for the process. `breakdown` has its parts.
    - `upper`: an upper bound for `process_memory`. `upper_covers` says whether it includes everything in `guessed`,
      `assumed` and `left_out`.
    - `peak_allocated`, `peak_reserved`: `torch.cuda.max_memory_allocated()` and `..._reserved()`.
    - `utilization`: the time of a step and the activity of the GPU. `training` extends it to a whole training.
    - `models`, `layers`: the models that the job called, and each of their modules.

    >>> from ullage import Model, estimate
    >>> found = estimate(Model("torchvision:alexnet", batch_size=8), gpu="T4")
    >>> found.fits, found.peak_allocated <= found.peak_reserved <= found.process_memory <= found.upper
    (True, True)
    """

    gpu: str
    gpu_memory: int
    peak_allocated: int | None
    peak_reserved: int | None
    process_memory: int | None
    upper: int | None
    breakdown: dict[str, int]
    fits: bool | None
    headroom: int | None
    steps: int
    seconds: float
    out_of_memory: str | None = None
    source: str | None = None
    peak_operator: str | None = None
    peak_module: str | None = None
    peak_class: str | None = None
    peak_pass: str | None = None
    peak_step: int | None = None
    reserved_operator: str | None = None
    reserved_module: str | None = None
    reserved_class: str | None = None
    reserved_pass: str | None = None
    reserved_step: int | None = None
    phases: dict[str, int] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)
    models: list[dict[str, Any]] = field(default_factory=list)
    doubtful: int | None = None
    guessed: dict[str, int] | None = None
    without_trials: dict[str, int] | None = None
    assumed: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    measured: bool | None = None
    computed_on: str | None = None
    gpu_assumed: bool = False
    pytorch: str | None = None
    attention: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list, repr=False)
    timeline: list[tuple[int, int, int]] = field(default_factory=list, repr=False)
    utilization: Utilization | None = None
    training: TrainingCost | None = None
    epoch_samples: int | None = None
    activity: dict[str, dict[str, Any]] = field(default_factory=dict)
    ranks: list[dict[str, int]] = field(default_factory=list)
    step_calls: StepCalls | None = field(default=None, repr=False, compare=False)
    estimator: str = "ullage"
    figure_kind: str = "process"
    schema_version: int = SCHEMA_VERSION

    @property
    def figure(self) -> int:
        """The estimator's main figure, of the kind that `figure_kind` names."""
        return self._known({"allocated": "peak_allocated", "reserved": "peak_reserved"}.get(self.figure_kind, PROCESS))

    @property
    def rank(self) -> int:
        """The rank that the figures describe, if several were followed; otherwise 0."""
        return max(self.ranks, key=lambda each: each["upper"])["rank"] if self.ranks else 0

    @property
    def bound(self) -> int:
        """The most memory that the job may need: `upper`, or `figure` without one; see `without_trials`."""
        if self.without_trials is not None:
            return self.without_trials["upper"]
        return self.figure if self.upper is None else self.upper

    @property
    def needed(self) -> int:
        """`figure`, but without the memory in which `cudnn.benchmark` only tries plans."""
        return self.figure if self.without_trials is None else self.without_trials[PROCESS]

    @property
    def peaks(self) -> tuple[int, int]:
        """Peak allocated and peak reserved memory; `InvalidValue` if the estimator does not know both."""
        return self._known("peak_allocated"), self._known("peak_reserved")

    def _known(self, name: str) -> int:
        value: int | None = getattr(self, name)
        if value is None:
            raise InvalidValue(f"the estimator {self.estimator} does not know {name}")
        return value

    def to_dict(self, timeline: bool = True, layers: bool = True) -> dict[str, Any]:
        """Return the attributes as plain values, optionally without the two long ones."""
        left_out = {name for name, wanted in (("timeline", timeline), ("layers", layers)) if not wanted}
        names = [name for name in self.__dataclass_fields__ if name not in {*left_out, "step_calls"}]
        others = {
            "utilization": None if self.utilization is None else self.utilization.to_dict(),
            "training": None if self.training is None else self.training.to_dict(),
            "upper_covers": self.upper_covers,
        }
        return {name: getattr(self, name) for name in names} | others

    def to_json(self, timeline: bool = True, indent: int | None = None, layers: bool = True) -> str:
        """Return the attributes as JSON."""
        return json.dumps(self.to_dict(timeline, layers), indent=indent)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read the dictionary of `to_dict`; keys of later versions are ignored."""
        if not isinstance(values, dict):
            raise InvalidValue(f"an estimate must be a dictionary, got {type(values).__name__}")
        known = known_fields(cls, values, "estimate")
        version = known.get("schema_version", SCHEMA_VERSION)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise InvalidValue(
                f"the schema version of an estimate must be at most {SCHEMA_VERSION}, got {version!r}. "
                f"A newer Ullage wrote it; type: {UPDATE}"
            )
        known["timeline"] = [tuple(point) for point in known.get("timeline", [])]
        if known.get("utilization") is not None:
            known["utilization"] = Utilization.from_dict(known["utilization"])
        if known.get("training") is not None:
            known["training"] = TrainingCost.from_dict(known["training"])
        return cls(**known | {"schema_version": SCHEMA_VERSION})

    def on_assumed_gpu(self) -> Self:
        """Return the estimate with the note that no GPU was named."""
        return replace(self, gpu_assumed=True, notes=[default_gpu_note(self.gpu), *self.notes])

    def with_utilization(self, step: StepCalls, gpu: GPU) -> Self:
        """Return the estimate with the time of a step on `gpu`.

        A failure becomes a note: an estimate of memory never fails because of it.
        """
        from ullage.performance.alone import utilization_of

        usage, notes = None, self.notes
        if step.is_whole:
            try:
                usage = utilization_of(step, gpu)
                usage = replace(usage, samples=step.samples or None, data_ranks=step.data_ranks or None)
                usage = replace(usage, notes=[*usage.notes, _OF_THE_LARGEST]) if step.largest else usage
            except Exception as error:
                notes = [*notes, f"how long a step takes is not known: {type(error).__name__}: {error}"]
        return replace(self, utilization=usage, step_calls=step, notes=list(dict.fromkeys(notes)))

    def for_training(self, plan: Training) -> Self:
        """Return the estimate with the time, energy and cost of a whole training.

        A step takes at least as long as its input. Unknown values become a note.
        """
        if plan.is_empty:
            return self
        utilization = self.utilization
        if utilization is None:
            if self.estimator != "ullage":
                raise InvalidValue(f"the estimator must be ullage for the time of a step, got {self.estimator}")
            return replace(self, notes=[*self.notes, "how long training takes is not known: no step was seen"])
        utilization = replace(utilization, samples=plan.samples_per_step or utilization.samples)
        try:
            utilization = utilization if plan.input_rate is None else utilization.fed_at(plan.input_rate)
            return replace(self, utilization=utilization, training=plan.cost(utilization, self.epoch_samples))
        except InvalidValue as error:  # the run did not show it; the estimate of memory still counts
            return replace(self, notes=[*self.notes, str(error)])

    @property
    def verdict(self) -> str:
        """The result in one line, such as "fits on A100-40GB: 14.2 of 39.5 GiB, 25.3 GiB free"."""
        if self.fits is None:
            return f"the memory on {self.gpu} is unknown: {self.estimator} predicts only the GPU's activity"
        if self.fits and self.before_training:
            return (
                f"fits so far on {self.gpu}: {used_of(self.needed, self.gpu_memory)}, but it has not trained one step"
            )
        if self.fits:
            needs = "" if self.without_trials is None else "needs "
            free = format_bytes(self.headroom or 0)
            return f"fits on {self.gpu}: {needs}{used_of(self.needed, self.gpu_memory)}, {free} free"
        lacking = -(self.headroom or 0)
        over = f", {format_bytes(lacking)} too much" if lacking > 0 else ""
        return f"DOES NOT FIT on {self.gpu}: needs {used_of(self.needed, self.gpu_memory)}{over}"

    @property
    def before_training(self) -> bool:
        """Whether the time limit ended the run before the first optimizer step."""
        return not self.steps and any(entry["what"] == AFTER_THE_TIME for entry in self.left_out)

    @property
    def mark(self) -> str:
        """✓ if the job fits, ✗ if it does not, ? if that is unknown or it has not trained."""
        if self.fits is None:
            return "?"
        return ("?" if self.before_training else "✓") if self.fits else "✗"

    @property
    def peak_words(self) -> str | None:
        """The request at the peak of allocated memory, in words; `None` if unknown."""
        return moment(self.peak_operator, self.peak_module, self.peak_pass, self.peak_step, self.peak_class)

    @property
    def reserved_words(self) -> str | None:
        """The request for which the allocator last took memory from the GPU, in words; `None` if unknown."""
        place = self.reserved_module, self.reserved_pass, self.reserved_step, self.reserved_class
        return moment(self.reserved_operator, *place)

    @property
    def peak_moment(self) -> str:
        """The pass and the step of the peak in brackets, such as " (backward pass, step 2)"; empty if unknown."""
        names = {"forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer step"}
        parts = [names.get(self.peak_pass or "", ""), f"step {self.peak_step}" if self.peak_step is not None else ""]
        return f" ({', '.join(filter(None, parts))})" if any(parts) else ""

    def part_words(self, name: str) -> str:
        """Describe a part of the breakdown, with its maximum if that is much larger."""
        words = BREAKDOWN_WORDS[name]
        types = list(dict.fromkeys(kind for model in self.models for kind in model["types"]))
        if name == "parameters" and any(kind.endswith("-bit") for kind in types):
            words = f"weights: {' and '.join(types)}"
        if name == "workspace" and self.without_trials is not None:
            words = f"{words}, or tried by cudnn.benchmark"
        most = self.largest.get(name, 0)
        much = most >= 2 * self.breakdown[name] and most - self.breakdown[name] >= MIN_REPORTED_SHARE * self.figure
        return f"{words}; up to {format_bytes(most)} at other times" if much else words

    @property
    def trial_words(self) -> str | None:
        """The peak with and without the plans that `cudnn.benchmark` tries, in one line; `None` if it is off."""
        if self.without_trials is None:
            return None
        needs, most = self.without_trials[PROCESS], self._known(PROCESS)
        if most == needs:
            return "trying cuDNN's plans takes no more than training does"
        tried = f"{format_bytes(most)} while cuDNN's plans are tried, {format_bytes(needs)} without"
        return f"{tried}: where less is free, less is tried"

    @property
    def tight(self) -> bool:
        """Whether the job fits by the estimate but not by its upper bound."""
        return bool(self.fits) and self.bound > self.gpu_memory

    @property
    def upper_covers(self) -> bool | None:
        """Whether `upper` covers all guesses, assumptions and omissions; `None` on a GPU that was not measured."""
        if not all(entry["covered"] for entry in self.assumed + self.left_out):
            return False
        return True if self.measured and self.upper is not None else None

    @property
    def certainty(self) -> str:
        """The confidence in one line: guesses, assumptions and omissions, and whether `upper` covers them."""
        if self.upper is None:
            return f"the estimator {self.estimator} gives no bound"
        most = f"at most {format_bytes(self.upper)}" + (", more than the GPU has" if self.tight else "")
        if self.measured is None:
            return most
        parts = [] if self.measured else [f"not measured on {self.gpu}: rules for other GPUs"]
        parts += [self._guessed_words] if self._guessed_words else []
        unsure = (("assumed", self.assumed), ("left out", self.left_out))
        parts += [f"{name}: {listed(entries)}" for name, entries in unsure if entries]
        if any(entry["what"] == AT_THEIR_MAXIMUM for entry in self.assumed):
            parts.append("sizes that depend on data make the figure a bound, not the memory of a run")
        if not parts:
            where = f"measured on {self.gpu} with PyTorch {MEASURED.name}"
            rules = "" if self.pytorch in (None, MEASURED.name) else f"; the rules are those of {self.pytorch}"
            return f"{most}: the memory of every kernel is known, {where}{rules}"
        return f"{most}: {'; '.join([*parts, *self._coverage])}"

    @property
    def _guessed_words(self) -> str | None:
        doubt = f", one may be {format_bytes(self.doubtful)} larger" if self.doubtful else ""
        if not self.guessed or not self.guessed["workspaces"]:
            return f"the choice of some kernels is doubtful{doubt}" if doubt else None
        share = self.guessed["bytes"] / max(1, self.guessed["of_bytes"])
        size = f"{share:.0%} of their bytes" if self.guessed["bytes"] else "to be empty"
        words = f"{self.guessed['workspaces']} of {self.guessed['of']} convolution workspaces were guessed"
        return f"{words} ({size}{doubt}), as cuDNN {MEASURED_CUDNN} chooses"

    @property
    def _coverage(self) -> list[str]:
        """Whether the bound covers guesses, assumptions and omissions."""
        missing = [entry for entry in self.assumed + self.left_out if not entry["covered"]]
        covered = [entry for entry in self.assumed + self.left_out if entry["covered"]]
        if missing:
            all_of_it = self.measured and not covered and not self._guessed_words
            widened = [entry for entry in missing if entry.get("adds")]
            others = [entry for entry in missing if not entry.get("adds")]
            added, words = format_bytes(sum(entry["adds"] for entry in widened)), []
            if widened:
                these = "this" if all_of_it and not others else listed(widened, counted=False)
                words.append(f"the bound adds {added} for {these}, which may be too little")
            if others:
                these = "this" if all_of_it and not widened else listed(others, counted=False)
                words.append(f"the bound does not cover {these}")
            return words
        if not self.measured:
            return ["the bound adds 5% for this"]
        return ["the bound allows for this"]

    @property
    def effort(self) -> str:
        """The steps that were run for the estimate, and their duration."""
        took = f"in {format_duration(self.seconds)}, without a GPU"
        if self.estimator == "ullage":
            return f"{self.steps} optimizer steps followed {took}"
        return f"estimated by {self.estimator} {took}"

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> Iterator["RenderableType"]:
        """Draw the report on a console."""
        from ullage.estimation.report import report_parts

        return report_parts(self, options.max_width)

    def __str__(self) -> str:
        from ullage.estimation.report import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        from ullage.estimation.report import as_html

        return as_html(self)


_OF_THE_LARGEST = "batches vary in size: this is a step with one of the largest"


def of_ranks(answers: Mapping[int, Estimate], like: Mapping[int, int] | None = None) -> Estimate:
    """Return the estimate of the rank that may need the most, with the figures of each, and the time of the slowest.
    `like` maps ranks that were not followed to those that stand for them."""
    number, most = max(answers.items(), key=lambda each: each[1].bound)
    if len(answers) == 1:
        return most
    names = ("peak_allocated", "peak_reserved", PROCESS, "upper")
    figures = {each: {name: getattr(answer, name) for name in names} for each, answer in answers.items()}
    ranks = [{"rank": each, **known} for each, known in figures.items()]
    if like is not None:
        ranks += [{**figures[other], "rank": each, "like": other} for each, other in like.items()]
        ranks.sort(key=lambda each: each["rank"])
    numbers = ", ".join(map(str, sorted(answers)))
    note = f"ranks {numbers} were followed; the figures are those of rank {number}, which takes most"
    timed = [each for each in answers.values() if each.utilization is not None]
    slowest = max(timed, key=lambda each: each.utilization.step_s, default=most)  # type: ignore[union-attr]
    return replace(
        most,
        ranks=ranks,
        fits=all(each.fits for each in answers.values()),
        notes=[note, *most.notes],
        utilization=slowest.utilization,
        step_calls=slowest.step_calls,
    )
