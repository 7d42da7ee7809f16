"""Put every part of the API in place, and take it away again.

PyTorch's own Python code stays in place wherever it can. What it asks of its C++ part is replaced
(`torch._C._cuda_...`), so that a CPU build, a CUDA build and a machine with a GPU give the same answers. All
replacements go into one list; leaving the `with` statement undoes them in reverse order.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage.virtual.call.replacements import Replacements
from ullage.virtual.compiler import triton
from ullage.virtual.compiler.install import install as install_compiler
from ullage.virtual.compiler.without_dynamo import no_compiler
from ullage.virtual.distributed import collectives, groups  # noqa: F401  (the first registers its handlers)
from ullage.virtual.state import GPUState
from ullage.virtual.torch_cuda import (
    backends,
    bitsandbytes,
    device,
    graphs,
    jiterator,
    memory,
    nested,
    random,
    refusals,
    saving,
    streams,
    targets,
    tensors,
    torchvision,
)

_PARTS = (  # in this order: later ones build on what earlier ones put in place
    device.install,
    memory.install,
    streams.install_events,
    streams.install,
    streams.install_recording,
    graphs.install,
    device.install_accelerator,
    random.install,
    backends.install,
    tensors.install_construction,
    tensors.install,
    saving.install,
    refusals.install_scripting,
    tensors.install_legacy_types,
    device.install_data_parallel,
    streams.install_threads,
    jiterator.install,
    nested.install,
    targets.install,
    refusals.install,
    groups.install,
    bitsandbytes.install,
    triton.install,
    install_compiler,
)


def install_torch_api(gpu: GPUState) -> Callable[[], None]:
    torchvision.make_torchvision_importable()
    replacements = Replacements()
    replacements.on_undo(no_compiler())
    try:
        for install_part in _PARTS:
            install_part(gpu, replacements)
    except BaseException:
        replacements.undo()
        raise
    return replacements.undo
