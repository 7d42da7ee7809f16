"""Read files of measured runs and join the lines of one run: its memory and its utilisation."""

import ast
import csv
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UllageError, UnknownName
from ullage.hardware import gpu
from ullage.jobs.model import ROW_KEYS, Model, read_rows
from ullage.units import MIB, format_bytes
from ullage_lab.clean.schema import COUNTED

# The reasons to drop a measured line, and the report of all dropped lines.

OUT_OF_MEMORY = "out of memory"
FAILED = "failed"
NO_STEP = "too few optimizer steps"
GAVE_BACK = "memory was short"
DUPLICATE = "duplicate"
IMPOSSIBLE = "impossible values"
NO_RUN = "no training run"
REASONS = {
    OUT_OF_MEMORY: "the GPU was too small for the run",
    FAILED: "the process ended without an answer, or the model did not run",
    NO_STEP: "a GradScaler skipped them: no pass ran with the optimizer's states in memory",
    GAVE_BACK: "cached memory had to be given back, so that the peak is not the run's own",
    DUPLICATE: "the same run on the same GPU and version of PyTorch already exists",
    IMPOSSIBLE: "figures that contradict each other, or less memory than weights and gradients take",
    NO_RUN: "the line is no configuration that Ullage can build",
}
NO_STATES = ("sgd",)  # optimizers without states
SHARES = ("gract", "smact", "smocc", "drama", "tensor")
COMPARED = ("step_s", "step_median", "host_s", "power_w", "energy_step_j")
ROUNDING = 1.01  # readings of a GPU's counters may slightly exceed 1
_FIELDS = tuple(ROW_KEYS.values())


@dataclass(frozen=True)
class Dropped:
    id: str
    reason: str
    detail: str
    source: str


@dataclass
class CleaningReport:
    """The fate of all measured lines: `read` = `kept` + `joined` (to a kept run) + dropped ones."""

    files: list[str] = field(default_factory=list)
    read: int = 0
    kept: int = 0
    joined: int = 0
    renamed: int = 0
    lent: int = 0  # runs that shared a process, with the context of others
    dropped: list[Dropped] = field(default_factory=list)
    blanked: Counter[str] = field(default_factory=Counter)
    repeated: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = field(default_factory=list)  # a run read twice

    def drop(self, id: str, reason: str, detail: str, source: str) -> None:
        self.dropped.append(Dropped(id, reason, detail, source))

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of dropped lines by reason, most frequent first."""
        return dict(Counter(one.reason for one in self.dropped).most_common())

    def noise(self) -> dict[str, dict[str, float]]:
        """Return how far two readings of the same run differ: times and power as shares, activity in percentage points.

        No model can be more exact than a second reading.

        >>> CleaningReport(repeated=[({"step_s": 0.10, "smact": 0.5}, {"step_s": 0.11, "smact": 0.52})]).noise()
        {'step_s': {'median': 0.1, 'p90': 0.1}, 'smact': {'median': 2.0, 'p90': 2.0}}
        """
        spreads: dict[str, dict[str, float]] = {}
        for name, relative in (*dict.fromkeys(COMPARED, True).items(), *dict.fromkeys(SHARES, False).items()):
            pairs = [(one[name], other[name]) for one, other in self.repeated if one.get(name) and other.get(name)]
            apart = sorted(abs(a - b) / a if relative else 100 * abs(a - b) for a, b in pairs)
            if apart:
                places = {"median": (len(apart) - 1) // 2, "p90": (len(apart) - 1) * 9 // 10}
                spreads[name] = {word: round(apart[place], 4) for word, place in places.items()}
        return spreads

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "dropped": self.counts,
            "blanked": dict(self.blanked),
            "repeated": len(self.repeated),
            "noise": self.noise(),
            "dropped_lines": [vars(one) for one in self.dropped],
        }


def trouble(line: Mapping[str, Any], card: int | None) -> tuple[str, str] | None:
    """Return why a measured line cannot be used, with details; `card` is the GPU's memory in bytes, if known.

    >>> trouble({"oom": "CUDA out of memory", "tried": 3 << 30}, None)
    ('out of memory', 'at 3.00 GiB')
    """
    if "failed" in line:
        return FAILED, str(line["failed"]).splitlines()[0] if line["failed"] else ""
    if "oom" in line:
        tried = line.get("tried")
        return OUT_OF_MEMORY, f"at {format_bytes(tried)}" if tried else str(line["oom"])
    if line.get("retries"):
        return GAVE_BACK, f"{line['retries']} times"
    steps = line.get("optimizer_steps")
    needed = 1 if line.get("opt") in NO_STATES else 2
    if steps is not None and steps < needed and not line.get("inference"):
        return NO_STEP, f"{steps} steps; needed {needed} with {line.get('opt')}"
    wrong = _contradiction(line, card)
    return None if wrong is None else (IMPOSSIBLE, wrong)


def _contradiction(line: Mapping[str, Any], card: int | None) -> str | None:
    allocated, reserved = line.get("peak_alloc"), line.get("peak_reserved")
    if not allocated or not reserved:
        return "no peak"
    if reserved < allocated:
        return f"{reserved} bytes reserved, {allocated} allocated"
    end, end_reserved = line.get("nvml_end"), line.get("end_reserved")
    if end_reserved is not None and end_reserved > reserved:
        return f"{end_reserved} bytes reserved at the end, {reserved} at the peak"
    if end is not None and end_reserved is not None and end <= end_reserved:
        return f"the process has {end} bytes, PyTorch {end_reserved}"
    process = process_memory(line)
    if card is not None and process is not None and process > card:
        return f"{format_bytes(process)} on a GPU of {format_bytes(card)}"
    return None


def too_little(allocated: int, parameters: int, precision: str, inference: bool = False) -> bool:
    """Whether tensors took less memory than the weights, and in training the gradients, need.

    >>> too_little(100, 10, "fp32"), too_little(70, 10, "fp32"), too_little(70, 10, "bf16")
    (False, True, False)
    """
    width = 2 if precision in ("bf16", "fp16") else 4
    return allocated < parameters * width * (1 if inference else 2)


def process_memory(line: Mapping[str, Any]) -> int | None:
    """Return the memory that nvidia-smi would have shown at the peak.

    NVML is read once, after the last step, when the allocator may hold less than at its peak. So the memory outside the
    allocator is that at the end, and its reserved memory is that at the peak.

    >>> process_memory({"nvml_end": 900, "end_reserved": 300, "peak_reserved": 400})
    1000
    """
    beside, reserved = context(line), line.get("peak_reserved")
    return None if beside is None or reserved is None else int(beside + reserved)


def context(line: Mapping[str, Any]) -> int | None:
    """Return the process memory outside PyTorch after the last step: the CUDA context with all loaded kernels."""
    end, reserved = line.get("nvml_end"), line.get("end_reserved")
    if end is None or reserved is None:
        lent: int | None = line.get("lent_context")
        return lent
    return int(end - reserved)


def share(value: float | None) -> float | None:
    """Return a share from 0 to 1; an impossible one is unknown.

    >>> share(0.4), share(1.004), share(-1.0)
    (0.4, 1.0, None)
    """
    return None if value is None or not 0 <= value <= ROUNDING else min(1.0, value)


@dataclass
class MeasuredLine:
    """A measured line, the file's word on the GPU and the versions, and the file's name."""

    row: dict[str, Any]
    header: dict[str, Any]
    source: str

    @property
    def id(self) -> str:
        return str(self.row.get("id", "?"))


@dataclass
class MergedRun:
    """One training run: the line whose memory counts, and one with utilisation if that was read."""

    id: str
    configuration: str
    memory: MeasuredLine
    utilization: MeasuredLine | None = None

    @property
    def lines(self) -> list[MeasuredLine]:
        apart = self.utilization is not None and self.utilization is not self.memory
        return [self.memory, self.utilization] if apart and self.utilization else [self.memory]


def canonical(row: dict[str, Any]) -> str:
    """Return the part of a line that describes the training, as JSON; equal for equal runs.

    >>> canonical({"id": "a", "model": "mlp:x", "opt": "sgd", "batch": 2, "widths": [8, 4], "seq": None})
    '{"model":"mlp:x","batch":2,"opt":"sgd","widths":[8,4]}'
    """
    row = {ROW_KEYS.get(name, name): value for name, value in row.items()}
    known = {name: row[name] for name in _FIELDS if row.get(name) is not None}
    return json.dumps(known, separators=(",", ":"))


def read_measured(files: Sequence[Path], report: CleaningReport) -> list[MergedRun]:
    """Return the runs of these files; note unusable lines in the report."""
    groups: dict[tuple[str, str | None, str | None], list[MeasuredLine]] = {}
    for file in files:
        header: dict[str, Any] = {}
        report.files.append(str(file))
        for row in read_rows(file):
            if "header" in row:
                header = row["header"] | {"gpu": gpu_name(row["header"].get("gpu"))}
                continue
            report.read += 1
            line = MeasuredLine(row, header, file.name)
            wrong = _no_run(row)
            if wrong is not None:
                report.drop(line.id, NO_RUN, wrong, line.source)
                continue
            key = (canonical(row), header.get("gpu"), header.get("torch"))
            groups.setdefault(key, []).append(line)
    runs = [run for key, lines in groups.items() if (run := _joined(key[0], lines, report)) is not None]
    _rename(runs, report)
    _lend_contexts(runs, report)
    return runs


def gpu_name(name: str | None) -> str | None:
    """Return the catalogue's name of a GPU, or the given name if the catalogue has none.

    >>> gpu_name("NVIDIA H200"), gpu_name("Voodoo 2")
    ('H200', 'Voodoo 2')
    """
    if name is None:
        return None
    try:
        return gpu(name).name
    except UnknownName:
        return name


def _no_run(row: dict[str, Any]) -> str | None:
    try:
        Model.from_row(row)
    except UllageError as error:
        return str(error).splitlines()[0]
    return None


def _joined(configuration: str, lines: list[MeasuredLine], report: CleaningReport) -> MergedRun | None:
    """Return the run of lines with the same configuration; the first usable line of each kind counts."""
    chosen: dict[str, MeasuredLine] = {}
    for line in lines:
        wrong = trouble(line.row, line.header.get("memory"))
        kind = str(line.row.get("pass") or "memory")
        if wrong is not None:
            report.drop(line.id, *wrong, line.source)
        elif kind in chosen:
            report.drop(line.id, DUPLICATE, f"of {chosen[kind].id}", line.source)
            if kind == "utilization":
                report.repeated.append((chosen[kind].row, line.row))
        else:
            chosen[kind] = line
    main = chosen.get("memory") or chosen.get("utilization")
    return None if main is None else MergedRun(main.id, configuration, main, chosen.get("utilization"))


def _rename(runs: list[MergedRun], report: CleaningReport) -> None:
    """Give runs of different sets with the same id new ids."""
    seen: set[tuple[str, Any, Any]] = set()
    for run in runs:
        number, name = 1, run.id
        header = run.memory.header
        while (run.id, header.get("gpu"), header.get("torch")) in seen:
            number += 1
            run.id = f"{name}+{number}"
        seen.add((run.id, header.get("gpu"), header.get("torch")))
        report.renamed += number > 1


def _lend_contexts(runs: list[MergedRun], report: CleaningReport) -> None:
    """Give runs that shared a process, which have no context of their own, the most frequent one of their kind."""
    contexts: dict[tuple[Any, ...], Counter[int]] = {}
    for run in runs:
        own = context(run.memory.row)
        if own is not None:
            contexts.setdefault(_kind(run), Counter())[own] += 1
    for run in runs:
        row = run.memory.row
        if ("in_bundle" in row or "in_process" in row) and context(row) is None and _kind(run) in contexts:
            row["lent_context"] = contexts[_kind(run)].most_common(1)[0][0]
            report.lent += 1


def _kind(run: MergedRun) -> tuple[Any, ...]:
    """Return the kind of a run; runs of one kind load the same libraries."""
    row, header = run.memory.row, run.memory.header
    return header.get("gpu"), header.get("torch"), row.get("family"), row.get("precision")


# Reads the tables that the authors of GPUMemNet published (CSV, measured on an A100-40GB) as rows of a data set.
#
# Their memory is the whole GPU's, sampled once a second; every run is in 32 bits with Adam; -1 means not measured.

GPU = "A100-40GB"
_NEEDED = (
    "Filename",
    "Activations-Params",
    "Activation Function",
    "Total Activations",
    "Total Parameters",
    "Batch Size",
    "Max GPU Memory (MiB)",
)
_KINDS = {
    "batch_normalization": "batch_norm",
    "batchnorm1d": "batch_norm",
    "batchnorm2d": "batch_norm",
    "layernorm": "layer_norm",
    "adaptive_avg_pool2d": "pooling",
    "maxpool2d": "pooling",
}
# A name such as "input_channels:3_arch:uniform_act:leaky_relu_dropout:0.3_dropout:True.out": keys and values may hold
# an underscore themselves, so that known keys are looked for.
_KEYS = (
    "input_channels",
    "num_classes",
    "base_filters",
    "input_size",
    "input",
    "output",
    "depth",
    "arch",
    "batch",
    "act",
    "dropout",
    "batchnorm",
)
_SETTING = re.compile(rf"(?:^|_)({'|'.join(_KEYS)}):(.*?)(?=_(?:{'|'.join(_KEYS)}):|$)")


def read_authors(file: Path, report: CleaningReport) -> list[dict[str, Any]]:
    """Return the rows of a table; note unusable ones in the report."""
    lines = _lines(file)
    report.files.append(str(file))
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, 2):
        report.read += 1
        name = line["Filename"].removesuffix(".out")
        if "OOM" in (line.get("Status") or ""):
            report.drop(name, OUT_OF_MEMORY, f"at {line['Max GPU Memory (MiB)']} MiB", file.name)
            continue
        try:
            row = _row(name, line, file.name, report)
        except (ValueError, SyntaxError, TypeError, KeyError) as error:
            raise InvalidValue(f"{file}, line {number}: cannot be read ({error})") from None
        if too_little(row["process_memory"], row["parameters"], "fp32"):
            report.drop(name, IMPOSSIBLE, "less memory than weights and gradients take", file.name)
        elif name in rows:
            report.drop(name, DUPLICATE, "", file.name)
        else:
            rows[name] = row
    report.kept += len(rows)
    return list(rows.values())


def _lines(file: Path) -> list[dict[str, str]]:
    try:
        with file.open(newline="") as source:
            reader = csv.DictReader(source)
            lines = list(reader)
    except OSError as error:
        raise InvalidValue(f"cannot read {file}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidValue(f"{file} must be a CSV file: {error}") from None
    missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise InvalidValue(f"{file} must be a table of GPUMemNet's authors: it lacks the column {missing[0]!r}")
    return lines


def settings_of(name: str) -> dict[str, str]:
    """Return the settings in a run's name. It has "dropout" twice: the rate, then whether it is used.

    >>> settings_of("input:4_act:leaky_relu_dropout:0.3_dropout:True")
    {'input': '4', 'act': 'leaky_relu', 'dropout': '0.3', 'with_dropout': 'True'}
    """
    settings: dict[str, str] = {}
    for key, value in _SETTING.findall(name):
        settings["with_dropout" if key in settings else key] = value
    return settings


def _row(name: str, line: dict[str, str], source: str, report: CleaningReport) -> dict[str, Any]:
    settings = settings_of(name)
    layers = [
        (_KINDS.get(kind.lower(), kind.lower()), int(outputs), int(own))
        for kind, outputs, own in ast.literal_eval(line["Activations-Params"])
    ]
    kinds = Counter(kind for kind, _, _ in layers)
    batch, activations = int(line["Batch Size"]), int(line["Total Activations"])
    return {
        "id": name,
        "family": "cnn" if kinds["conv2d"] else "mlp",
        "arch": settings.get("arch"),
        "configuration": json.dumps(settings, separators=(",", ":")),
        "batch_size": batch,
        "input_elements": _input_elements(settings),
        "parameters": int(line["Total Parameters"]),
        "activations": activations,
        "activations_batch": activations * batch,
        "depth": kinds["linear"] + kinds["conv2d"],
        **{f"count_{kind}": kinds[kind] for kind in COUNTED},
        "activation_function": line["Activation Function"].lower(),
        "optimizer": "adam",
        "precision": "fp32",
        "layers": layers,
        "process_memory": round(float(line["Max GPU Memory (MiB)"]) * MIB),
        **_shares(line, report),
        "gpu": GPU,
        "source": source,
    }


def _input_elements(settings: dict[str, str]) -> int | None:
    if "input" in settings:
        return int(settings["input"])
    if "input_size" not in settings:
        return None
    return int(settings.get("input_channels", 3)) * int(settings["input_size"]) ** 2


def _shares(line: dict[str, str], report: CleaningReport) -> dict[str, float | None]:
    shares: dict[str, float | None] = {}
    for name in ("gract", "smact", "smocc"):
        text = line.get(f"Avg {name.upper()}")
        shares[name] = share(float(text)) if text else None
        report.blanked[name] += shares[name] is None
    report.blanked += type(report.blanked)()  # without zeros
    return shares
