"""`fast`: memory from a job's totals alone, in less than a millisecond, with a bound that holds for 99 in 100 jobs.

For schedulers that know a model's summary and must answer at once. A closed formula says most; regression trees on the
logarithm of what it leaves over say the rest: one set for the median, one for a high quantile, which is then shifted
until it held for 99 % of jobs that the trees had not seen (split conformal prediction).
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.estimation.estimators.answer import answer, read_options
from ullage.estimation.estimators.fast.model import NAMES, Trees, vector_of
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.estimators.walknet.estimator import supports
from ullage.estimation.estimators.walknet.inputs import row_of
from ullage.estimation.estimators.weights_file import write_weights
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.units import MIB
from ullage.workloads.workload import Workload

WEIGHTS = Path(__file__).parents[1] / "data" / "fast.safetensors"
CONTEXT = 760 * MIB  # where the catalogue does not know a GPU's context


@dataclass(frozen=True)
class Fast:
    """The trained trees; `shift` is added to the logarithm of the high quantile."""

    middle: Trees
    high: Trees
    shift: float
    card: dict[str, Any]

    def reserved(self, row: Mapping[str, Any]) -> tuple[int, int]:
        """Reserved memory in bytes, and the bound that 99 in 100 jobs stay below."""
        features, closed = vector_of(row)
        middle = self.middle.sum(features)
        high = max(self.high.sum(features) + self.shift, middle)
        return int(closed * math.exp(middle)), int(closed * math.exp(high))


def save(model: Fast, path: Path) -> None:
    """Write the trees and their card; `load` gives them back."""
    from safetensors.numpy import save as packed

    arrays = model.middle.arrays("middle") | model.high.arrays("high")
    facts = {"card": json.dumps(model.card), "shift": repr(model.shift), "features": " ".join(NAMES)}
    write_weights(path, packed(arrays, facts))


def load(path: Path) -> Fast:
    """The trees of a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            if metadata["features"].split() != list(NAMES):
                raise InvalidValue(f"{path} was trained by another version of Ullage: it reads other features")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            card, shift = json.loads(metadata["card"]), float(metadata["shift"])
        return Fast(Trees.from_arrays(arrays, "middle"), Trees.from_arrays(arrays, "high"), shift, card)
    except InvalidValue:
        raise
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, json.JSONDecodeError) as error:
        told = str(error).splitlines() or [type(error).__name__]
        raise InvalidValue(
            f"needed the trees of fast in {path}: {told[0]}; 'ullage train fast --out {path.name}' makes them"
        ) from None


@functools.cache
def trained(path: Path = WEIGHTS) -> Fast:
    """As `load`, once a process."""
    return load(path)


@estimator(
    "fast",
    title="a closed formula over a job's totals, corrected by regression trees, with a 99 % bound",
    source="this project, docs/gpumemnet.md; trained here (src/ullage/estimators/data/fast.md)",
    needs="the model by name; no GPU",
    supports=supports,
)
def run(workload: Workload, gpu: GPU) -> Estimate:
    """Estimate from the totals of a model."""
    begin = time.perf_counter()
    options = read_options("fast", workload.options, {"weights": ""})
    assert workload.configuration is not None
    model = trained(Path(options["weights"]) if options["weights"] else WEIGHTS)
    row = row_of(workload.configuration)
    reserved, bound = model.reserved(row)
    context = gpu.context if gpu.context is not None else CONTEXT
    most = gpu.context_upper if gpu.context_upper is not None else context
    return answer(
        "fast",
        gpu,
        "process",
        {"activations": reserved, "context": context},
        seconds=time.perf_counter() - begin,
        notes=_notes(model.card, gpu),
        known={"peak_reserved": reserved, "upper": bound + most},
    )


def _notes(card: dict[str, Any], gpu: GPU) -> list[str]:
    notes = ["a closed formula over totals, corrected by trained trees; what it reserves is not told apart into parts"]
    unseen = card.get("real", {})
    if unseen:
        notes.append(
            f"on real models of families that the trees had not seen its median error is {unseen['median']:.1%}, "
            f"{unseen['under']:.0%} of the figures are too low, and {unseen['covered']:.1%} lie below upper"
        )
    if gpu.name != card.get("gpu", gpu.name):
        notes.append(
            f"trained on an {card['gpu']}: reserved memory is that of an {card['gpu']}, the context {gpu.name}'s"
        )
    return notes
