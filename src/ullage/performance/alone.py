"""Step time and GPU activity of a job that has a GPU to itself."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from ullage.hardware import GPU
from ullage.performance.data_sheet import KERNELS
from ullage.performance.network import SPACE, WAIT, Exchange, Pipeline
from ullage.performance.networks import interconnect_of
from ullage.performance.rates import SHARES, Floats, Rates, load, measured_gpu, of_call
from ullage.performance.result import FILLS, KernelGroup, Utilization
from ullage.performance.step import StepCalls, runs_kernels, waits_for_gpu
from ullage.performance.timeline import Launch, Launches
from ullage.performance.work import Work, tensors_of, work_of

_TENSORS, _NUMBERS = 128, 2 * 320 * 65536  # limits of one kernel on lists: tensors of two lists, and numbers


@dataclass(frozen=True)
class StepWork:
    """GPU and host work of one training step.

    `works` are its distinct calls with kernels, `counts` their numbers, `host` the parts of host work
    (`rates.HOST_PARTS`), `host_calls` the operator calls by pass (`host_name`; more if one launches a kernel per
    sample), `launches` all calls in order, `copied` the bytes of copies that the host waits for. `exchange` is the data
    exchanged with other ranks; `places` maps each distinct call of the step to its place in `works`.
    """

    works: list[Work]
    counts: Floats
    host: dict[str, float]
    host_calls: dict[str, float]
    launches: Launches
    copied: int
    steady: bool
    waits: int
    exchange: Exchange | None = None
    places: dict[int, int] = field(default_factory=dict)
    interconnect: str | None = None

    @classmethod
    def of(cls, step: StepCalls) -> Self:
        waits = copied = 0
        works: list[Work] = []
        counts, places = [], {}
        host: Counter[str] = Counter(
            forward=1,
            modules=step.modules,
            forward_nodes=step.nodes,
            backward_nodes=step.nodes,
            optimizer_steps=step.optimizer_steps,
            cpu_bytes=step.cpu_bytes,
        )
        host_calls: dict[str, float] = defaultdict(float)
        lengths: Counter[str] = Counter()
        launches: dict[int, Launch] = {}
        for number, count in Counter(step.order).items():
            call = step.calls[number]
            waiting = waits_for_gpu(call)
            waits += count * waiting
            if call["operator"].startswith(f"{SPACE}."):
                if call["operator"] != WAIT:
                    host_calls[host_name(call)] += count
                    launches[number] = Launch(host_name(call))
                continue
            if not runs_kernels(call):
                if waiting:
                    launches[number] = Launch("", waits=True)
                continue
            work = work_of(call)
            tensors, name, times = 0, host_name(call), 1.0 if work.serial is None else work.serial.launches
            if work.kind == "lists":
                name, tensors = "lists", sum(1 for _ in tensors_of(call["args"]))
                host["lists"] += count
                host["listed_tensors"] += count * tensors
                lengths[call["operator"]] += count * sum(1 for _ in tensors_of(call["args"][:1]))
            elif call.get("pass") == "optimizer":
                name = "optimizer_calls"
                host[name] += count
            else:
                host_calls[name] += count * times
                host["compiled_kernels"] += count * call["operator"].startswith(_COMPILED)
            if work.kind == "transfer":
                copied += count * max(work.read, work.written) * waiting
            else:
                places[number] = len(works)
                works.append(work)
                counts.append(count)
            launches[number] = Launch(name, places.get(number, -1), tensors, waiting, times)
        host["backward"] = int(any(name.startswith("backward") for name in host_calls))
        host["compiled"] = int(host["compiled_kernels"] > 0)
        host["waits"], host["parameters"] = waits, max(lengths.values(), default=0)
        parts = {**host, "checkpointed_nodes": step.nodes * _recomputed_share(host_calls)}
        return cls(
            works=works,
            counts=np.array(counts, dtype=np.float64),
            host=parts,
            host_calls=dict(host_calls),
            launches=Launches.of(launches, step.order),
            copied=copied,
            steady=step.steady,
            waits=waits,
            exchange=Exchange.of(step),
            places=places,
            interconnect=step.interconnect,
        )


def _recomputed_share(calls: Mapping[str, float]) -> float:
    """Return the share of the forward pass that activation checkpointing repeats in the backward pass, by operators
    whose gradients are also in the step: they do not belong in a backward pass themselves."""
    counts: dict[str, dict[str, float]] = {"forward": defaultdict(float), "backward": defaultdict(float)}
    for name, count in calls.items():
        which, operator, *_ = name.split()
        counts[which][operator] += count
    gradients = {operator.partition("_backward")[0] for operator in counts["backward"] if "_backward" in operator}
    gradients |= {operator.removesuffix("_dense") for operator in gradients}
    several = [operator for operator in counts["forward"] if operator in gradients]
    first, again = (sum(counts[which][operator] for operator in several) for which in ("forward", "backward"))
    return min(1.0, again / first) if first else 0.0


_COMPILED = ("triton.triton_poi_", "triton.triton_red_", "triton.triton_per_")  # as the compiler names its kernels


def utilization_of(step: StepCalls, gpu: GPU, rates: Rates | None = None) -> Utilization:
    """Predict the time of a step on a GPU, and how busy it keeps the GPU."""
    return utilization_of_work(StepWork.of(step), gpu, rates or load())


def utilization_of_work(work: StepWork, gpu: GPU, rates: Rates) -> Utilization:
    """Predict the same from the work of a step."""
    measured = gpu.name == measured_gpu().name
    vectors = rates.vectors(work.works)
    times = rates.times(work.works, vectors)
    shares = rates.shares_of(work.works, vectors, times)
    if not measured:
        times = moved_times(work.works, times, gpu)
    times = times + rates.gaps_of(work.works)
    busy = work.counts * times
    gpu_s = float(busy.sum())
    network = {} if work.exchange is None else _exchanged(work, work.exchange, times, gpu)
    network_s = network.get("network_s", 0.0)
    host_s, copy_s = host_time(rates, work), work.copied / rates.copied
    step_s = copy_s + together(rates, work, times, gpu_s + network_s)
    bubble_s = 0.0
    if work.exchange is not None:  # a pipeline's, by its schedule or else by its messages
        pipeline = Pipeline.of(Counter(work.exchange.collectives()))
        by_messages = 0.0 if pipeline is None else pipeline.bubble
        bubble_s = step_s * (by_messages if work.exchange.bubble is None else work.exchange.bubble)
    step_s += bubble_s
    active: dict[str, Any] = {name: float((busy * shares[name]).sum()) / step_s if step_s else 0.0 for name in SHARES}
    power_w = rates.idle_w + sum(rates.power[name] * share for name, share in active.items())
    power_w = min(power_w * power_ratio(gpu), gpu.power_w or np.inf)
    return Utilization(
        gpu=gpu.name,
        step_s=step_s,
        gpu_s=gpu_s,
        host_s=copy_s + host_s,
        power_w=power_w,
        energy_j=power_w * step_s,
        flops=float(sum(count * one.flops for one, count in zip(work.works, work.counts, strict=True))),
        bytes=float(sum(count * one.bytes for one, count in zip(work.works, work.counts, strict=True))),
        kernels=int(work.counts.sum()),
        steady=work.steady,
        measured=measured,
        waits=work.waits,
        copy_s=copy_s,
        bubble_s=bubble_s,
        kernel_groups=groups_of(work.works, work.counts, times, np.maximum(shares["smact"], shares["drama"])),
        **active,
        **network,
    )


def _exchanged(work: StepWork, exchange: Exchange, times: Floats, gpu: GPU) -> dict[str, Any]:
    """Return the fields of `Utilization` about other ranks: collectives, and the time waiting for them."""
    by = interconnect_of(gpu, work.interconnect)
    seconds = np.zeros(int(exchange.order.max(initial=0)) + 1)
    for number, place in work.places.items():
        seconds[number] = times[place]
    sent = Counter(exchange.collectives())
    return {
        "network_s": exchange.waiting(seconds, by),
        "interconnect": str(by),
        "collectives": [
            {**one._asdict(), "count": count, "seconds": count * one.seconds(by)} for one, count in sent.items()
        ],
    }


def moved_times(works: Sequence[Work], times: Floats, gpu: GPU) -> Floats:
    """Return the seconds of calls on another GPU than the measured one: the least time there, and the same seconds
    beyond it. Latency, and SMs without work in a small call, do not grow on a slower GPU."""
    here, there = (np.array([one.least_time(card) for one in works]) for card in (measured_gpu(), gpu))
    return np.asarray(np.maximum(there + times - here, np.minimum(there, times)))


def power_ratio(gpu: GPU) -> float:
    """Return a GPU's power limit over that of the measured GPU; 1 if unknown."""
    limit = measured_gpu().power_w
    return gpu.power_w / limit if gpu.power_w and limit else 1.0


def host_name(call: Mapping[str, Any]) -> str:
    """Return the key of a call's host time: its pass, backward or forward, and its operator (`host_word`)."""
    which = "backward" if call.get("pass") == "backward" else "forward"
    return f"{which} {host_word(call)}"


def host_word(call: Mapping[str, Any]) -> str:
    """Return an operator's name in host times. Convolutions of single channels take PyTorch's own kernels, at half the
    host time; those of groups take more kernels."""
    word = str(call["operator"]).split(".")[1]
    place = _GROUPS.get(word)
    if place is None or len(call.get("args", ())) <= place:
        return word
    groups, source = call["args"][place], call["args"][word.endswith("backward")]
    if groups == 1:
        return word
    return f"{word} {'depthwise' if groups == source['shape'][1] else 'grouped'}"


_GROUPS = {"convolution": 8, "convolution_overrideable": 8, "_convolution": 8, "convolution_backward": 9}


def host_time(rates: Rates, work: StepWork) -> float:
    """Return the seconds that the host needs to launch a step, without the copies that it waits for."""
    parts = sum(rates.host.get(name, 0.0) * count for name, count in work.host.items())
    whole = float(parts + sum(count * of_call(rates.host_calls, name) for name, count in work.host_calls.items()))
    return whole * rates.uneven(whole)


def together(rates: Rates, work: StepWork, times: Floats, gpu_s: float) -> float:
    """Return the seconds in which the host launches a step and the GPU runs it for `gpu_s`, overlapping."""
    host, gpu = both_sides(rates, work, times, gpu_s)
    return max(host_time(rates, work), rates.stretch * gpu_s, work.launches.end(host, gpu))


def times_of(rates: Rates, work: StepWork) -> Floats:
    return rates.times(work.works, rates.vectors(work.works)) + rates.gaps_of(work.works)


def both_sides(rates: Rates, work: StepWork, times: Floats, gpu_s: float) -> tuple[Floats, Floats]:
    """Return the host and GPU seconds of each launch; the GPU needs `gpu_s` in all."""
    gpu = work.launches.on_gpu(times)
    whole = float(gpu.sum())
    host = work.launches.on_host(rates.host, rates.host_calls, work.host)
    host = host * rates.uneven(float(host.sum()))
    return host, gpu * (rates.stretch * gpu_s / whole) if whole else gpu


def parts_of(work: Work) -> Sequence[float]:
    """Return the kernels of a call, as shares of its time; jobs that share a GPU wait for them.

    A convolution is several kernels, and so are optimizer calls on lists that do not fit into one.
    """
    if work.kind in ("convolution", "convolution_backward"):
        return tuple(KERNELS[work.kind][_kind_of_convolution(work.shape)])
    if work.kind == "lists":
        tensors, numbers = 2 ** work.shape["tensors"], 2 ** work.shape["numbers"]
        count = max(1, math.ceil(tensors / _TENSORS), math.ceil(numbers / _NUMBERS))
        return (1 / count,) * count
    known = KERNELS["recurrent"] if work.kind == "recurrent" else KERNELS["operators"].get(work.operator, (1.0,))
    return tuple(known)


def _kind_of_convolution(shape: Mapping[str, float]) -> str:
    if shape["depthwise"]:
        return "depthwise"
    if shape["groups"]:
        return "grouped"
    if not shape["window"]:
        return "of single places"
    return "channels last" if shape["layout"] else ""


def groups_of(works: Sequence[Work], counts: Floats, times: Floats, fills: Floats) -> list[KernelGroup]:
    """Return the kernels of a step, grouped by factors of two in length, those that fill the SMs apart from the others.
    Each of the works runs `counts` times, takes `times` seconds, and fills the share `fills` of the SMs."""
    shares = [parts_of(work) for work in works]
    places = np.repeat(np.arange(len(works)), [len(parts) for parts in shares])
    if not len(places):
        return []
    each = times[places] * np.concatenate([np.asarray(parts) for parts in shares])
    keys = 2 * np.floor(np.log2(np.maximum(each, 1e-9))).astype(np.int64) + (fills[places] >= FILLS)
    _, group = np.unique(keys, return_inverse=True)
    count, fill = counts[places], fills[places]
    sums = [np.bincount(group, weights=values) for values in (count, count * each, count * each * fill)]
    return [KernelGroup(*(float(f"{value:.4g}") for value in row)) for row in zip(*sums, strict=True)]
