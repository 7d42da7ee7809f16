"""Chooses calls to measure: a fair sample of the calls of training runs that are followed on a virtual GPU.

The runs are drawn: models of torchvision, timm and transformers, and generated ones. The same seed draws the same runs,
as far as the installed packages name the same models.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UllageError
from ullage.jobs import JobRequest, Model, Script, read_rows
from ullage.performance.step import runs_kernels
from ullage.units import GIB
from ullage_lab.calls import bytes_of, identity, unpacked
from ullage_lab.draw.configurations import draw
from ullage_lab.draw.generated import FAMILIES, DrawingLimits, generate
from ullage_lab.following import step_of
from ullage_lab.networks.rarer import rarer_runs

Each = Callable[[Iterable[dict[str, Any]], int], Iterable[dict[str, Any]]]
MOST_CALLS = 6000

_GENERATED = 0.4  # of the runs
_RARER = 0.08
_SMALL = 0.25  # share of the runs with one of these batch sizes
_SMALL_BATCHES = (1, 2, 4)
_LARGEST_HIDDEN = 1536
_LIBRARIES, _MORE = ("mm.", "convolution", "attention", "rnn"), 3  # their kernels follow no simple rule: measure more
_NOT_MEASURED = ("cuda.", "triton.")


def drawn_runs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return N random runs in the form of a file of configurations."""
    chance = random.Random(f"rates {seed}")
    generated = round(count * _GENERATED)
    limits = DrawingLimits(memory=20 * GIB, seconds=0.06)
    rows: list[dict[str, Any]] = []
    for place, family in enumerate(FAMILIES):
        rows += generate(family, (generated + place) // len(FAMILIES), seed, limits=limits)
    rows += rarer_runs(round(count * _RARER), seed)
    real = [row for row in draw(2 * count, seed) if not _is_large(row)]
    rows += real[: count - len(rows)]
    for row in rows:
        if chance.random() < _SMALL:
            row["batch"] = chance.choice(_SMALL_BATCHES)
    chance.shuffle(rows)
    return rows


def _is_large(row: dict[str, Any]) -> bool:
    sizes = row.get("hf_config", {})
    return (
        max((sizes.get(name, 0) for name in ("hidden_size", "n_embd", "d_model", "dim")), default=0) > _LARGEST_HIDDEN
    )


def followed(rows: Iterable[dict[str, Any]], gpu: str = "H200") -> Iterator[dict[str, Any]]:
    """Yield each run with its step on the virtual GPU (`step`), or with the reason why there is none (`failed`)."""
    for row in rows:
        try:
            step = step_of(JobRequest(Model.from_row(row)), gpu)
            yield {**row, "step": step.to_dict()}
        except (UllageError, ImportError, MemoryError) as error:
            yield {**row, "failed": str(error)[:300]}


def chosen(steps: Sequence[dict[str, Any]], count: int, whole: int = 0, seed: int = 0) -> list[dict[str, Any]]:
    """Return N distinct calls, ordered so that every beginning is a fair sample.

    These are all calls of the first `whole` steps that run kernels. The others are drawn evenly over operators, types
    and sizes, from each operator in proportion to the root of its number of calls.
    """
    chance = random.Random(f"calls {seed}")
    first: dict[str, dict[str, Any]] = {}
    others: dict[str, dict[str, Any]] = {}
    for place, step in enumerate(steps):
        for call in step["calls"]:
            if not call["operator"].startswith(_NOT_MEASURED):
                taken = first if place < whole and runs_kernels(call) else others
                taken.setdefault(identity(call), call)
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, call in others.items():
        if name not in first:
            groups[call["operator"]].append(call)
    wanted = max(0, count - len(first))
    shares = {
        name: math.sqrt(len(calls)) * (_MORE if any(word in name for word in _LIBRARIES) else 1)
        for name, calls in groups.items()
    }
    drawn: list[tuple[float, dict[str, Any]]] = []
    for name, calls in groups.items():
        for place, call in enumerate(_spread(calls, chance)):
            drawn.append((place / shares[name], call))
    drawn.sort(key=lambda entry: entry[0])
    picks = [*first.values(), *(call for _, call in drawn[:wanted])]
    chance.shuffle(picks)
    return picks


def _spread(calls: list[dict[str, Any]], chance: random.Random) -> list[dict[str, Any]]:
    """Return calls in an order in which every type and size comes soon: one of each class by turns."""
    classes: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for call in calls:
        size = bytes_of([call["args"], call["outputs"]])
        types = tuple(sorted({str(value["dtype"]) for value in call["outputs"] if isinstance(value, dict)}))
        classes[types, int(math.log2(size + 1))].append(call)
    ordered: list[tuple[float, float, dict[str, Any]]] = []
    for several in classes.values():
        chance.shuffle(several)
        ordered += [(place, chance.random(), call) for place, call in enumerate(several)]
    ordered.sort(key=lambda entry: entry[:2])
    return [call for _, _, call in ordered]


def drawn_calls(
    runs: int, seed: int = 0, most: int = MOST_CALLS, each: Each = lambda rows, _: rows
) -> list[dict[str, Any]]:
    """Return the calls of N drawn runs, up to a limit; `each` may report the progress."""
    followed_runs = each(followed(drawn_runs(runs, seed)), runs)
    return chosen([run["step"] for run in followed_runs if "step" in run], most, seed=seed)


def calls_of_script(path: Path, args: Sequence[str]) -> list[dict[str, Any]]:
    step = step_of(JobRequest(Script(path, args)))
    return chosen([step.to_dict()], len(step.calls), whole=1)


def listed_calls(path: Path) -> list[dict[str, Any]]:
    """Read the calls of a file (also `.gz`) with one packed call per line, or with measured rows."""
    rows = (row.get("call", row) for row in read_rows(path))
    calls = [unpacked(row) for row in rows if "operator" in row and "tensors" in row]
    if not calls:
        raise InvalidValue(f"{path} has no operator calls, as 'ullage lab measure calls --dry-run' prints them")
    return calls
