"""`fast`: memory from a job's totals alone, in less than a millisecond, with a bound that holds for 99 in 100 jobs.

For schedulers that know a model's summary and must answer at once. A closed formula over the totals explains most;
regression trees predict the logarithm of the residual: one set for the median, one for a high quantile, which is then
shifted until it held for 99% of jobs that the trees had not seen (split conformal prediction). The trees are trained
by `ullage lab train fast`.
"""

import functools
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.errors import InvalidValue
from ullage.estimation.estimators.answer import answer, read_options, supports_training_by_name
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.jobs.job import JobRequest
from ullage.performance.trees import Trees
from ullage.units import MIB
from ullage_lab.estimators.fast.features import (
    COUNTS,
    ONE_BY_ONE,
    OPTIMIZERS,
    PRECISIONS,
    STATES,
    TEMPORARIES,
    optimizer_of,
)
from ullage_lab.estimators.fast.rows import row_of
from ullage_lab.estimators.weights import write_weights

WORKSPACES = 66 * MIB  # cuBLAS in both passes on compute capability 9, and the smallest segments of the allocator
_SIZES = ("batch_size", "input_elements", "sequence_length", "parameters", "activations", "depth")
NAMES = (
    *_SIZES,
    *COUNTS,
    "weights",
    "state",
    "kept",
    "masks",
    "norms",
    "widest",
    "kept_share",
    "widest_share",
    "weights_share",
    "closed_formula",
    "kept_each",
    "weights_each",
    *(f"optimizer_{name}" for name in OPTIMIZERS),
    "optimizer_fused",
    *(f"precision_{name}" for name in PRECISIONS),
)


def parts_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the closed formula's terms in bytes.

    `kept` is the memory for the backward pass (the numbers that autograd keeps if the row has them, else all
    activations), `widest` the largest output of a layer, of which a gradient or a copy is live as well.
    """
    precision = str(row.get("precision") or "fp32")
    low, amp = precision in ("bf16", "fp16"), precision.startswith("amp")
    width, narrow = (2 if low else 4), (2 if low or amp else 4)
    name, fused = optimizer_of(row)
    batch, parameters = int(row["batch_size"]), float(row["parameters"])
    trainable = float(row.get("trainable") or parameters)
    numbers = row.get("kept_numbers")
    masks = float(row.get("kept_bytes") or 0) * batch
    activations = float(row.get("activations") or 0 if numbers is None else numbers) * batch * narrow + masks
    norms = float(row.get("norm_numbers") or 0) * batch * 2 if amp else 0.0
    widest = max((int(layer["activations"]) for layer in row.get("layers") or ()), default=0) * batch * narrow
    return {
        "weights": parameters * width + (parameters * 2 if amp else 0.0),
        "gradients": trainable * width,
        "state": trainable * width * STATES.get(name, 2),
        "temporaries": 0.0 if fused or name == ONE_BY_ONE else trainable * width * TEMPORARIES.get(name, 1),
        "kept": activations + norms,
        "masks": masks,
        "norms": norms,
        "widest": float(widest),
    }


def closed_bytes(parts: Mapping[str, float]) -> float:
    """Return reserved memory by the closed formula: weights, state, and the larger of two peaks."""
    peak = max(parts["kept"] + parts["widest"], parts["gradients"] + parts["temporaries"])
    return float(parts["weights"] + parts["state"] + peak + WORKSPACES)


def vector_of(row: Mapping[str, Any]) -> tuple[npt.NDArray[np.float64], float]:
    """Return the features in the order of NAMES, and the closed formula's bytes."""
    parts = parts_of(row)
    closed = closed_bytes(parts)
    name, fused = optimizer_of(row)
    precision = str(row.get("precision") or "fp32")
    values = [math.log1p(float(row.get(size) or 0)) for size in _SIZES]
    values += [math.log1p(float(row.get(count) or 0)) for count in COUNTS]
    values += [math.log1p(parts[part]) for part in ("weights", "state", "kept", "masks", "norms", "widest")]
    values += [parts["kept"] / closed, parts["widest"] / closed, parts["weights"] / closed, math.log(closed)]
    depth = float(row.get("depth") or 1)
    values += [math.log1p(parts["kept"] / depth), math.log1p(parts["weights"] / depth)]
    values += [float(name == known) for known in OPTIMIZERS] + [float(fused)]
    values += [float(precision == known) for known in PRECISIONS]
    return np.array(values), closed


WEIGHTS = Path(__file__).parents[1] / "data" / "fast.safetensors"
CONTEXT = 760 * MIB  # if the catalogue does not have a GPU's context


@dataclass(frozen=True)
class Fast:
    """The trained trees; `shift` is added to the logarithm of the high quantile."""

    middle: Trees
    high: Trees
    shift: float
    card: dict[str, Any]

    def reserved(self, row: Mapping[str, Any]) -> tuple[int, int]:
        """Return reserved memory in bytes, and the bound below which 99 in 100 jobs stay."""
        features, closed = vector_of(row)
        middle = self.middle.sum(features)
        high = max(self.high.sum(features) + self.shift, middle)
        return int(closed * math.exp(middle)), int(closed * math.exp(high))


def save(model: Fast, path: Path) -> None:
    from safetensors.numpy import save as packed

    arrays = model.middle.arrays("middle") | model.high.arrays("high")
    facts = {"card": json.dumps(model.card), "shift": repr(model.shift), "features": " ".join(NAMES)}
    write_weights(path, packed(arrays, facts))


def load(path: Path = WEIGHTS) -> Fast:
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
        lines = str(error).splitlines() or [type(error).__name__]
        raise InvalidValue(
            f"cannot read the trees of fast in {path}: {lines[0]}; 'ullage lab train fast --out {path.name}' makes them"
        ) from None


trained = functools.cache(load)


@estimator(
    "fast",
    title="a closed formula over a job's totals, corrected by regression trees, with a 99% bound",
    source="this project; trained here (lab/src/ullage_lab/estimators/data/fast.md)",
    needs="the model by name; no GPU",
    supports=supports_training_by_name,
)
def run(request: JobRequest, gpu: GPU) -> Estimate:
    begin = time.perf_counter()
    options = read_options("fast", request.options, {"weights": ""})
    assert request.model is not None
    model = trained(Path(options["weights"]) if options["weights"] else WEIGHTS)
    row = row_of(request.model)
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
    notes = ["a closed formula over totals, corrected by trained trees; its reserved memory has no parts"]
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
