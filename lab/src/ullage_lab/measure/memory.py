"""Measure memory in a child of the fork server: a separate context, a few training steps, figures.

The keys are those of `ullage measure`, so that the files go wherever those go.
"""

import functools
import gc
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ullage.jobs import Model, train
from ullage.jobs.sources.build import prepare
from ullage.jobs.training import low_precision
from ullage.measuring.single_run import ProcessMemory
from ullage.units import parse_bytes

# Makes new networks start from cheap weights, on which the memory of training does not depend.
#
# Drawing a billion normal numbers on one core takes ten seconds, to send them to the GPU one more; a run there takes
# less. Small weights are filled by repeating a short block of random numbers, as small as the usual starting weights.
# Large ones are not filled at all, and `on_gpu` makes them there, in the order and the sizes in which
# `model.to("cuda")` would bring them. None may be left as they are found: with 16-bit gradients a GradScaler skips the
# optimizer's step while gradients are not finite, and the optimizer's states would never come to be.

_BLOCK = 1 << 16
_LARGE = 1 << 20  # bytes
_LEFT = "left_for_the_gpu"  # attribute of parameters without values yet
_RANDOM = (
    "uniform_",
    "normal_",
    "trunc_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "xavier_uniform_",
    "xavier_normal_",
)
LEAST_STEPS = 2  # of the optimizer: the first creates its states, the next runs with them
# A GradScaler skips steps while its factor is too large, which it halves each time; it begins with 2 to the 16.
MOST_SKIPPED = 12
_TRIED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]?i?B)")


def fill(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Fill with repeated random numbers, no larger than one over the root of the larger of its two sides.

    Large parameters are only marked, for `on_gpu`.
    """
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return tensor
    if isinstance(tensor, nn.Parameter) and tensor.nbytes >= _LARGE:
        setattr(tensor, _LEFT, True)
        return tensor
    block = _block() * _bound(tensor)
    with torch.no_grad():
        flat = tensor.detach().view(-1)
        whole = flat.numel() // _BLOCK * _BLOCK
        if whole:
            flat[:whole].view(-1, _BLOCK).copy_(block.to(flat.dtype).expand(whole // _BLOCK, _BLOCK))
        flat[whole:].copy_(block[: flat.numel() - whole])
    return tensor


def _bound(tensor: torch.Tensor) -> float:
    rows = tensor.shape[0]
    longest = max(rows, tensor.numel() // rows) if tensor.dim() > 1 else max(tensor.numel(), 100)
    return float(longest**-0.5)


@functools.cache
def _block() -> torch.Tensor:
    return torch.rand(_BLOCK, generator=torch.Generator().manual_seed(0)) * 2 - 1


def on_gpu(model: nn.Module, low: torch.dtype | None = None, *, drawn: bool = False, device: str = "cuda") -> nn.Module:
    """Bring a network that was made in `cheap_start` to the GPU, its floating-point numbers cast to `low`.

    Large weights are zero there, which loads no kernel that training does not; or `drawn` at random, if the values
    matter.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        dtype = low if low is not None and tensor.is_floating_point() else tensor.dtype
        if getattr(tensor, _LEFT, False):
            delattr(tensor, _LEFT)  # a parameter shared by two modules comes twice
            made = torch.empty_like(tensor, dtype=dtype, device=device)
            return made.uniform_(-_bound(tensor), _bound(tensor)) if drawn else made.zero_()
        return tensor.to(dtype).to(device)  # in this order: a cast on the GPU would take memory there

    with torch.no_grad():
        model._apply(move)
    return model


@contextmanager
def cheap_start() -> Iterator[None]:
    """Inside the `with`, PyTorch's functions for random initial weights fill cheaply; `on_gpu` does the rest.

    Not covered: weights that a model fills by its tensors' own methods (`weight.data.normal_()`); they are only slower.
    """
    before = {name: getattr(nn.init, name) for name in _RANDOM}
    try:
        for name in _RANDOM:
            setattr(nn.init, name, fill)
        yield
    finally:
        for name, function in before.items():
            setattr(nn.init, name, function)


class EnoughSteps(Exception):
    """Stops the training loop."""


@dataclass
class PreparedMemoryRun:
    """A child that is ready to begin: its model is on the CPU, and it has a context."""

    configuration: Model
    made: Any
    iterations: int
    nvml: ProcessMemory | None
    context: int | None
    began: float
    figures: dict[str, Any] = field(default_factory=dict)


def prepare_memory(order: dict[str, Any], ask_nvml: bool = True) -> PreparedMemoryRun:
    began = time.perf_counter()
    torch.cuda.synchronize()  # makes the context, and leaves the allocator as a script finds it
    nvml = ProcessMemory(torch.cuda.get_device_properties(0).uuid) if ask_nvml else None
    context = nvml.read() if nvml else None
    configuration = Model.from_row(order)
    with cheap_start():
        made = prepare(configuration)
    return PreparedMemoryRun(configuration, made, int(order.get("iterations", 3)), nvml, context, began)


def run_memory(prepared: PreparedMemoryRun, pause: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Train a few steps; running out of memory is also a result."""
    figures: dict[str, Any] = {"nvml_ctx": prepared.context}
    steps: list[None] = []
    times: list[float] = []
    counted = register_optimizer_step_post_hook(lambda *_: steps.append(None))  # a GradScaler may have skipped some

    def note() -> None:
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        print(f"step {len(times)} {times[-1] - started:.4f} s peak {torch.cuda.max_memory_reserved()}")  # to its log
        if len(times) >= prepared.iterations and (len(steps) >= LEAST_STEPS or len(times) == most):
            # While model, batch and loss are still alive.
            figures["nvml_end"] = prepared.nvml.read() if prepared.nvml else None
            figures["end_reserved"] = torch.cuda.memory_reserved()
            raise EnoughSteps

    most = prepared.iterations + (MOST_SKIPPED if prepared.configuration.precision == "amp_fp16" else 0)
    (model, task), prepared.made = prepared.made, None
    started = time.perf_counter()
    try:
        made = on_gpu(model, low_precision(prepared.configuration)), task
        train(prepared.configuration, most, after_iteration=note, prepared=made)
    except EnoughSteps:
        pass
    except torch.OutOfMemoryError as error:
        figures |= out_of_memory(error)
    finally:
        counted.remove()
    statistics = torch.cuda.memory_stats()
    figures["peak_alloc"] = statistics["allocated_bytes.all.peak"]
    figures["peak_reserved"] = statistics["reserved_bytes.all.peak"]
    figures["retries"] = statistics["num_alloc_retries"]
    figures["optimizer_steps"] = len(steps)
    if len(times) > 1:
        figures["step_shared_s"] = round(times[-1] - times[-2], 5)
    figures["prepare_s"] = round(started - prepared.began, 3)
    figures["wall_s"] = round(time.perf_counter() - prepared.began, 3)
    return figures


def out_of_memory(error: BaseException) -> dict[str, Any]:
    """Return the message, and the memory that the process would have needed: reserved memory and the failed request."""
    text = str(error).splitlines()[0].split(" If reserved")[0][:300]
    match = _TRIED.search(text)
    request = parse_bytes(match[1].replace(" ", "")) if match else None
    tried = None if request is None else torch.cuda.memory_reserved() + request
    return {"oom": text, "tried": tried}


def describe_gpu() -> dict[str, Any]:
    """Return the GPU and the versions for the first line of a measured file. Makes a context."""
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    nvml = ProcessMemory(properties.uuid)
    return {
        "gpu": properties.name,
        "uuid": nvml.uuid,
        "memory": total,
        "free": free,
        "sms": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": nvml.driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "context": nvml.read(),
        "cores": os.cpu_count(),
    }


# Several memory runs in one process, one after the other, each on an allocator that is empty again.
#
# To make a CUDA context and to load kernels takes seconds, in which the driver lets no other process do the same; a run
# takes a tenth of one. What PyTorch's allocator does in a run depends on nothing but the run once all memory is given
# back, cuBLAS's workspaces among it, so its figures are those of a fresh process. NVML's are not: kernels of earlier
# runs stay loaded. Rows from a bundle therefore have no `nvml_end`; a run that does not end well is left for a fresh
# process.

Order = dict[str, Any]
_OUTSIDE = ("nvml_end", "nvml_ctx")


def bundle(orders: Sequence[Order], size: int, need: Callable[[Order], int]) -> list[Order]:
    """Return bundles of runs with similar needs, shuffled so that a stopped session leaves no size out."""
    alike = sorted(orders, key=need)
    parts = [alike[begin : begin + size] for begin in range(0, len(alike), size)]
    random.Random(0).shuffle(parts)
    parts.sort(key=len, reverse=True)
    return [
        {
            "id": f"bundle-{number}",
            "rows": part,
            "room": max(need(order) for order in part),
            "parameters": max(int(order.get("parameters") or 500_000_000) for order in part),
        }
        for number, part in enumerate(parts)
    ]


def prepare_bundle(order: Order) -> Order:
    torch.cuda.synchronize()
    return order


def run_bundle(order: Order, pause: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Measure one row after the other; skip the first that fails, and all after it."""
    answers: dict[str, Any] = {}
    for row in order["rows"]:
        if not emptied():
            break
        begin = time.perf_counter()
        try:
            answer = run_memory(prepare_memory(row, ask_nvml=False))
        except Exception as error:
            print(f"{row['id']}: {type(error).__name__}: {error}")
            break
        if "oom" in answer or answer["retries"]:
            break
        answers[row["id"]] = {key: value for key, value in answer.items() if key not in _OUTSIDE} | {
            "in_bundle": len(answers),
            "wall_s": round(time.perf_counter() - begin, 3),
        }
    return {"answers": answers}


def emptied() -> bool:
    """Free all memory, so that the allocator is as in a new process."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    return torch.cuda.memory_reserved() == 0


def untied(order: Order, answer: dict[str, Any]) -> Iterator[tuple[Order, dict[str, Any] | None]]:
    """Yield every row of a bundle with its answer, or with `None` if it has none."""
    answers = answer.get("answers", {})
    for row in order["rows"]:
        yield row, answers.get(row["id"])
