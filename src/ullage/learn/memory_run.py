"""What a child of the fork server does to measure memory: a context of its own, a few steps of training, figures.

The keys are those of `ullage measure`, so that the files go wherever those go.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ullage.learn.cheap_start import cheap_start, on_gpu
from ullage.measure.process_memory import ProcessMemory
from ullage.units import parse_bytes
from ullage.workload import Configuration, train
from ullage.workload.building import prepare
from ullage.workload.training import low_precision

LEAST_STEPS = 2  # of the optimizer: its states come in the first, and a pass with them is the next
# A GradScaler skips steps while its factor is too large, which it halves each time; it begins with 2 to the 16.
MOST_SKIPPED = 12
_TRIED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]?i?B)")


class Enough(Exception):
    """Ends the training loop."""


@dataclass
class Prepared:
    """A child that may begin: the model is on the CPU, the context is there."""

    configuration: Configuration
    made: Any
    iterations: int
    nvml: ProcessMemory | None
    context: int | None
    began: float
    figures: dict[str, Any] = field(default_factory=dict)


def prepare_memory(order: dict[str, Any], ask_nvml: bool = True) -> Prepared:
    """Make the context and the model."""
    began = time.perf_counter()
    torch.cuda.synchronize()  # makes the context, and leaves the allocator as a script finds it
    nvml = ProcessMemory(torch.cuda.get_device_properties(0).uuid) if ask_nvml else None
    context = nvml.read() if nvml else None
    configuration = Configuration.from_row(order)
    with cheap_start():
        made = prepare(configuration)
    return Prepared(configuration, made, int(order.get("iterations", 3)), nvml, context, began)


def run_memory(prepared: Prepared, pause: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Train a few steps; running out of memory is an answer too."""
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
            raise Enough

    most = prepared.iterations + (MOST_SKIPPED if prepared.configuration.precision == "amp_fp16" else 0)
    (model, task), prepared.made = prepared.made, None
    started = time.perf_counter()
    try:
        made = on_gpu(model, low_precision(prepared.configuration)), task
        train(prepared.configuration, most, after_iteration=note, prepared=made)
    except Enough:
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
    """The message, and how large the process would have become: what it had reserved and what it asked for."""
    text = str(error).splitlines()[0].split(" If reserved")[0][:300]
    found = _TRIED.search(text)
    asked = parse_bytes(found[1].replace(" ", "")) if found else None
    tried = None if asked is None else torch.cuda.memory_reserved() + asked
    return {"oom": text, "tried": tried}


def describe_gpu() -> dict[str, Any]:
    """The GPU and the versions, as the first line of a measured file has them. Makes a context."""
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
