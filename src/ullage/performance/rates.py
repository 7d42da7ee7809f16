"""The time and GPU activity of an operator call, fitted to measurements on an H200.

A call takes its least time by the data sheet (`Work.least_time`) times a factor, which regression trees predict. They
were fitted to single calls and whole runs together, so that calls are right by themselves and add up to the time of a
step. Other trees predict the shares of that time: SMACT, SMOCC, DRAMA and tensor activity. `ullage lab train
utilization` makes the file. On another GPU a call takes its least time there, and as much beyond it in seconds. That
was not measured.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ullage.errors import InvalidValue
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.performance.trees import Trees
from ullage.performance.work import KINDS, Work, bandwidth_of

SHIPPED = Path(__file__).parent / "data" / "rates.safetensors"
SHARES = ("smact", "smocc", "drama", "tensor")
_TYPES = ("float32", "bfloat16", "float16", "float64", "complex64", "int")
_OF_EACH_CALL = ("kind", "type", "tf32", "read", "written", "flops", "intensity", "least_time", "operator")
_OF_SHARES = ("time", "factor")  # which the trees of shares also read
_MISSING = -1.0
# Host work in each pass of a step besides calls of operators; each part takes time. `forward` and `backward` are the
# passes themselves, `lists` calls with many tensors, as optimizers make them, `parameters` the longest of their lists,
# `optimizer_calls` an optimizer's other calls, `cpu_bytes` the bytes that operators on the CPU write. `compiled` is 1
# if torch.compile wrote kernels, whose guards are checked, and `compiled_kernels` is the number that a step launches.
# `checkpointed_nodes` are the autograd nodes whose saved tensors are computed a second time.
HOST_PARTS: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward", "modules", "forward_nodes", "cpu_bytes", "compiled", "compiled_kernels"),
    "backward": ("backward", "backward_nodes", "checkpointed_nodes"),
    "optimizer": ("optimizer_steps", "lists", "listed_tensors", "parameters", "optimizer_calls", "waits"),
}

EVEN_S = 0.02  # host work in a step for which a host's factor holds exactly
# Seconds of parts that few runs have, measured by themselves and not fitted with the others: a byte that an operator
# on the CPU writes, mostly into new memory; the parts of compiled programs above; and a checkpoint's hooks, which are
# Python's, for each tensor that a node saves.
KNOWN_PARTS: Mapping[str, float] = {
    "cpu_bytes": 1 / 3.2e9,
    "compiled": 0.37e-3,
    "compiled_kernels": 23e-6,
    "checkpointed_nodes": 11e-6,
}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rates:
    """Fitted rates, and the `card` that they were fitted on. Trees read the features that `shape` names, in its order.

    `starts` are added to the predictions of the trees of shares. `operators` has the usual factor of each operator.
    `gap_s` is the time between two kernels, `gaps` that before calls of some kinds: large kernels of libraries, which
    were timed in a loop but are cold in a step. `host` has seconds for each of HOST_PARTS, `host_calls` those for a
    call of an operator by its pass ("backward mm"), and for unnamed operators ("backward"). On another machine, long
    steps may take longer relative to short ones (`host_power`, see `uneven`). `power` has watts for each share, and
    `idle_w` those without any.

    A step first copies its input, at `copied` bytes a second, and does nothing else meanwhile; this holds for unpinned
    memory. Then the host launches, and the GPU takes `stretch` times as long as it works (`performance.timeline`).
    """

    time: Trees
    shares: Mapping[str, Trees]
    starts: Mapping[str, float]
    operators: Mapping[str, float]
    usual: float
    gap_s: float
    host: Mapping[str, float]
    copied: float
    stretch: float
    idle_w: float
    power: Mapping[str, float]
    shape: Sequence[str] = ()  # names in `Work.shape`
    card: Mapping[str, Any] = field(default_factory=dict)
    host_calls: Mapping[str, float] = field(default_factory=dict)
    host_power: float = 0.0
    gaps: Mapping[str, float] = field(default_factory=dict)

    def with_host(self, factor: float, power: float = 0.0) -> Self:
        """Return the same rates with another host, `factor` times slower for a step of EVEN_S; see `uneven`."""
        parts, calls = ({name: factor * one for name, one in all_.items()} for all_ in (self.host, self.host_calls))
        return replace(self, host=parts, host_calls=calls, host_power=power)

    def uneven(self, seconds: float) -> float:
        """Return how many times longer the host takes for this much work: longer work misses its caches more."""
        return (seconds / EVEN_S) ** self.host_power if seconds else 1.0

    def vectors(self, works: Sequence[Work]) -> Floats:
        """Return the features of calls: `_OF_EACH_CALL`, and those of their shapes that the trees read."""
        width = len(_OF_EACH_CALL) + len(self.shape)
        return np.array([self._vector(work) for work in works]).reshape(len(works), width)

    def _vector(self, work: Work) -> list[float]:
        kind = float(KINDS.index(work.kind))
        type_ = float(_TYPES.index(work.dtype)) if work.dtype in _TYPES else float(len(_TYPES))
        read, written = math.log2(work.read + 1), math.log2(work.written + 1)
        flops, moved = math.log2(work.flops + 1), math.log2(work.bytes + 1)
        least = math.log2(1e6 * work.least_time(measured_gpu()))
        operator = self.operators.get(work.operator, self.usual)
        of_shape = [work.shape.get(name, _MISSING) for name in self.shape]
        return [kind, type_, float(work.tf32), read, written, flops, flops - moved, least, operator, *of_shape]

    def times(self, works: Sequence[Work], vectors: Floats) -> Floats:
        return np.maximum(self.usual_times(works) * np.exp(self.time.sums(vectors)), serial_times(works))

    def gaps_of(self, works: Sequence[Work]) -> Floats:
        """Return the seconds before each call of a step."""
        return np.array([self.gaps.get(work.kind, self.gap_s) for work in works])

    def usual_times(self, works: Sequence[Work]) -> Floats:
        """Return seconds of calls by the usual factor of each operator over its least time."""
        card = measured_gpu()
        usual = np.array([self.operators.get(work.operator, self.usual) for work in works])
        return np.asarray(np.array([work.least_time(card) for work in works]) * np.exp(usual))

    def shares_of(self, works: Sequence[Work], vectors: Floats, times: Floats) -> dict[str, Floats]:
        rows = share_vectors(works, vectors, times)
        priors = prior_shares(works, times)
        most = _most_active(works, times)
        return {
            name: np.minimum(1 / (1 + np.exp(-(self.starts[name] + priors[name] + trees.sums(rows)))), most)
            for name, trees in self.shares.items()
        }


def of_call(calls: Mapping[str, float], name: str) -> float:
    """Return a call's value by its name, or by a shorter part of the name."""
    while name and name not in calls:
        name = name.rpartition(" ")[0]
    return calls.get(name, 0.0)


def serial_times(works: Sequence[Work]) -> Floats:
    """Return the least seconds of calls whose kernels work one after the other."""
    return np.array([0.0 if work.serial is None else work.serial.seconds for work in works])


def _most_active(works: Sequence[Work], times: Floats) -> Floats:
    """Return the share of SMs with a block, for calls limited by serial work; else 1."""
    sms = measured_gpu().sms or 1
    most = np.ones(len(works))
    for place, (work, taken) in enumerate(zip(works, times.tolist(), strict=True)):
        if work.serial is not None and taken <= work.serial.seconds:
            most[place] = min(1.0, work.serial.blocks / sms)
    return most


def share_vectors(works: Sequence[Work], vectors: Floats, times: Floats) -> Floats:
    """Return the features of calls for the trees of shares."""
    least = np.array([work.least_time(measured_gpu()) for work in works])
    return np.column_stack([vectors, np.log2(1e6 * times), np.log2(times / least)])


def prior_shares(works: Sequence[Work], times: Floats) -> dict[str, Floats]:
    """Return shares without trees, as logits: bytes over bandwidth, operations over tensor cores' rate."""
    card = measured_gpu()
    moved = np.array([work.bytes for work in works]) / (times * bandwidth_of(card))
    done = np.array([work.flops / work.rate(card) if work.on_tensor_cores else 0.0 for work in works]) / times
    middle = np.zeros(len(times))
    return {"smact": middle, "smocc": middle, "drama": _logit(moved), "tensor": _logit(done)}


def _logit(share: Floats) -> Floats:
    clipped = np.clip(share, 0.003, 0.97)
    return np.asarray(np.log(clipped / (1 - clipped)))


@functools.cache
def measured_gpu() -> GPU:
    return find_gpu("H200")


_TIMES = ("starts", "operators", "usual", "gap_s", "gaps", "host", "host_calls", "copied", "stretch")
_FACTS = (*_TIMES, "idle_w", "power", "card")


def packed(rates: Rates) -> bytes:
    """Serialize rates; `load` reads them."""
    from safetensors.numpy import save

    arrays = rates.time.arrays("time")
    for name, trees in rates.shares.items():
        arrays |= trees.arrays(name)
    facts = {name: getattr(rates, name) for name in _FACTS}
    features = [*_OF_EACH_CALL, *(f"shape_{name}" for name in rates.shape), *_OF_SHARES]
    return bytes(save(arrays, {"facts": json.dumps(facts), "features": " ".join(features)}))


@functools.cache
def load(path: Path = SHIPPED) -> Rates:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            features = metadata["features"].split()
            shape = [name.removeprefix("shape_") for name in features if name.startswith("shape_")]
            if [name for name in features if not name.startswith("shape_")] != [*_OF_EACH_CALL, *_OF_SHARES]:
                raise InvalidValue(f"{path} was trained by another version of Ullage: it reads other features")
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = json.loads(metadata["facts"])
        facts["host"] = {**KNOWN_PARTS, **facts["host"]}
        if facts["host"].keys() != {name for several in HOST_PARTS.values() for name in several}:
            raise InvalidValue(f"{path} was trained by another version of Ullage: it knows the host by other parts")
        shares = {name: Trees.from_arrays(arrays, name) for name in SHARES}
        return Rates(time=Trees.from_arrays(arrays, "time"), shares=shares, shape=shape, **facts)
    except InvalidValue:
        raise
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise InvalidValue(
            f"cannot read the rates in {path}: {reason}; 'ullage lab train utilization --out {path.name}' makes them"
        ) from None
