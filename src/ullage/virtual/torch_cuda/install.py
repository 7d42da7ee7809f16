"""Install every part of the API, and remove it again.

PyTorch's own Python code stays where possible. Its calls into the C++ part are replaced (`torch._C._cuda_...`), so a
CPU build, a CUDA build and a machine with a GPU give the same answers.
"""

import importlib.util
from collections.abc import Callable

from ullage.virtual.call.replacements import Replacements
from ullage.virtual.compiler import dynamo, graph_trees, inductor, triton, without_triton
from ullage.virtual.compiler.without_dynamo import no_compiler
from ullage.virtual.distributed import collectives, groups  # noqa: F401  (the first registers its handlers)
from ullage.virtual.operators import autocast, decompositions
from ullage.virtual.state import GPUState
from ullage.virtual.torch_cuda import (
    backends,
    bitsandbytes,
    device,
    graphs,
    memory,
    random,
    refusals,
    saving,
    small_parts,
    streams,
    tensors,
    torchvision,
)


def install_compiler(gpu: GPUState, replacements: Replacements) -> None:
    """Install `torch.compile` on the virtual GPU; without Triton it runs the eager code."""
    if importlib.util.find_spec("triton") is None:
        without_triton.install(gpu, replacements)
        return
    for part in (graph_trees, inductor, dynamo):  # compiled code is dropped before the other parts are removed
        part.install(gpu, replacements)


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
    small_parts.install_jiterator,
    small_parts.install_nested,
    small_parts.install_targets,
    refusals.install,
    groups.install,
    bitsandbytes.install,
    triton.install,
    install_compiler,
    decompositions.install,
    autocast.install,
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
