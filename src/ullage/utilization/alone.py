"""A job alone on a GPU: how long its step takes, and how busy it keeps the GPU."""

from __future__ import annotations

from ullage.hardware import GPU
from ullage.utilization.result import Utilization
from ullage.utilization.step import StepCalls, runs_kernels
from ullage.utilization.work import work_of

_LAUNCH = 25e-6  # seconds of the host for each call
_SHORTEST = 2e-6  # seconds of a kernel


def utilization_of(step: StepCalls, gpu: GPU) -> Utilization:
    """How long a step takes on a GPU, and how busy it keeps it."""
    bandwidth, rate = (gpu.bandwidth or 1000.0) * 1e9, (gpu.fp32_tflops or 20.0) * 1e12
    gpu_s = flops = moved = 0.0
    kernels = 0
    for call in step:
        if runs_kernels(call):
            work = work_of(call)
            gpu_s += max(work.flops / rate, work.bytes / bandwidth, _SHORTEST)
            flops, moved, kernels = flops + work.flops, moved + work.bytes, kernels + 1
    host_s = len(step.order) * _LAUNCH
    step_s = max(gpu_s, host_s)
    drama = min(1.0, moved / bandwidth / step_s) if step_s else 0.0
    busy = gpu_s / step_s if step_s else 0.0
    power = 120 + 500 * busy
    return Utilization(
        gpu=gpu.name, step_s=step_s, gpu_s=gpu_s, host_s=host_s, smact=busy, smocc=busy / 3, drama=drama, tensor=0.0,
        power_w=power, energy_j=power * step_s, flops=flops, bytes=moved, kernels=kernels, steady=step.steady,
        measured=gpu.name == "H200", waits=step.waits,
    )  # fmt: skip
