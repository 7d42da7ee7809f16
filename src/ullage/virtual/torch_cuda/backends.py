"""torch.backends.cuda and torch.backends.cudnn: both are available, and their switches work."""

import functools
from contextlib import suppress
from typing import Any

import torch
from torch.backends import ContextProp

from ullage.virtual.call.plan import HANDLERS, RULES
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.state import GPUState

# Settings that select kernels, by names in torch._C: getters and setters. Not every release has all of them.
_SWITCHES = {
    **{
        f"_get_{name}": f"_set_{name}"
        for name in ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_allow_tf32", "cublas_allow_tf32")
    },
    "_get_float32_matmul_precision": "_set_float32_matmul_precision",
    "_get_math_sdp_allow_fp16_bf16_reduction": "_set_math_sdp_allow_fp16_bf16_reduction",
    "_get_sdp_priority_order": "_set_sdp_priority_order",
    **{f"_get_{name}_sdp_enabled": f"_set_sdp_use_{name}" for name in ("flash", "mem_efficient", "math", "cudnn")},
}
_PRECISIONS = (("generic", "all"), ("cuda", "all"), ("cuda", "conv"), ("cuda", "rnn"), ("cuda", "matmul"))

_FLATTEN = "aten._cudnn_rnn_flatten_weight.default"


def install(gpu: GPUState, replacements: Replacements) -> None:
    _keep_switches(replacements)
    limit = [10]  # aten/src/ATen/Context.h, benchmark_limit_cudnn

    get_limit, set_limit = (lambda: limit[0]), functools.partial(limit.__setitem__, 0)
    cudnn: Any = torch.backends.cudnn
    replacements.put(cudnn.m, "_init", lambda: True)
    replacements.put(cudnn.m, "__cudnn_version", gpu.release.cudnn)
    replacements.put(type(cudnn), "benchmark_limit", ContextProp(get_limit, set_limit))
    replacements.put_all(
        torch._C,
        {
            "_has_cudnn": True,
            "_cuda_get_cudnn_benchmark_limit": get_limit,
            "_cuda_set_cudnn_benchmark_limit": set_limit,
            "_is_flash_attention_available": lambda: True,
        },
    )
    _remember_preference(replacements, "linalg")
    _remember_preference(replacements, "blas")
    # Weights are flattened for cuDNN if there is a rule for the memory of that.
    replacements.put(torch, "_use_cudnn_rnn_flatten_weight", lambda: _FLATTEN in RULES or _FLATTEN in HANDLERS)
    manager: Any = torch.backends.cuda.cufft_plan_cache
    before, manager.caches[:] = list(manager.caches), [_PlanCache()]
    replacements.on_undo(lambda: manager.caches.__setitem__(slice(None), before))


def _keep_switches(replacements: Replacements) -> None:
    """Restore switches that a program sets: the next one in this process finds the same settings."""

    def keep(setter: str, getter: str, *words: Any) -> None:
        if hasattr(torch._C, getter):
            with suppress(RuntimeError):  # the older name of a switch that was set by the newer one
                value = getattr(torch._C, getter)(*words)
                replacements.on_undo(lambda: getattr(torch._C, setter)(*words, value))

    for pair in _PRECISIONS:
        keep("_set_fp32_precision_setter", "_get_fp32_precision_getter", *pair)
    for getter, setter in _SWITCHES.items():
        keep(setter, getter)
    deterministic = torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()
    replacements.on_undo(lambda: torch._C._set_deterministic_algorithms(deterministic[0], warn_only=deterministic[1]))
    for put_back, *before in (
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch._C._set_grad_enabled, torch.is_grad_enabled()),
        (torch.set_autocast_enabled, "cuda", torch.is_autocast_enabled("cuda")),
        (torch.set_autocast_dtype, "cuda", torch.get_autocast_dtype("cuda")),
    ):
        replacements.on_undo(functools.partial(put_back, *before))


def _remember_preference(replacements: Replacements, library: str) -> None:
    """`preferred_linalg_library("magma")`: a build without MAGMA refuses it, the virtual GPU stores it."""
    getter, setter = f"_get_{library}_preferred_backend", f"_set_{library}_preferred_backend"
    if not hasattr(torch._C, getter):
        return
    preferred = [getattr(torch._C, getter)()]
    replacements.put(torch._C, getter, lambda: preferred[0])
    replacements.put(torch._C, setter, lambda backend: preferred.__setitem__(0, backend))


class _PlanCache:
    """A cuFFT plan cache that stays empty."""

    def __init__(self) -> None:
        self.size, self.max_size = 0, 4096  # aten/src/ATen/native/cuda/CuFFTPlanCache.h

    def clear(self) -> None:
        """Do nothing: there is nothing to clear."""
