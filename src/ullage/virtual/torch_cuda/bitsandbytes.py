"""bitsandbytes: its own Python functions run, so that their memory is known for every version and GPU, up to the calls
into its compiled library by address, which do nothing."""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

from ullage.virtual.call.native import any_on_gpu
from ullage.virtual.call.plan import handler
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.state import GPUState

_KERNELS = "bitsandbytes.backends.cuda.ops"
_USERS = ("bitsandbytes.cextension", "bitsandbytes.functional", _KERNELS)  # each has a name for the library
_MANAGED = "cget_managed_ptr"


class _Library:
    """A replacement for the compiled library: every function exists and returns 0."""

    compiled_with_cuda = True

    def __init__(self, gpu: GPUState) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> Any:
        def function(*args: Any) -> int:
            if name == _MANAGED:
                self._gpu.refuse("bitsandbytes' paged optimizers", "use the one without 'paged' in its name")
            return 0

        return function


def install(gpu: GPUState, replacements: Replacements) -> None:
    def put(module: ModuleType) -> None:
        replacements.put_existing(module, "lib", _Library(gpu))
        replacements.forget_answers(module)  # by device number, which may belong to another virtual GPU

    for name in _USERS:
        replacements.when_imported(name, put)


@handler("bitsandbytes")
def run_kernel(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any_on_gpu((*args, *kwargs.values())):
        return NotImplemented
    if _KERNELS not in sys.modules:  # it was imported before there was a GPU
        try:
            importlib.import_module(_KERNELS)
        except ImportError:
            return NotImplemented  # older than its kernels in Python
    for key in ("CUDA", "CompositeExplicitAutograd"):
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            with gpu.mode:
                return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)
    return NotImplemented
