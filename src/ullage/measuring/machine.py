"""A machine with a GPU for `ullage contribute` and `ullage measure context`: its description, and runs."""

from collections.abc import Callable
from typing import Any

from ullage.errors import UllageError
from ullage.hardware.local import driver_version
from ullage.measuring.contribution import header_of
from ullage.measuring.runs import RunRequest, apart, local_gpu, measure_apart


def describe(nvml: Any = None) -> dict[str, Any]:
    """Return the header of a contribution for this machine's first GPU; without one, the error says what to do."""
    card = local_gpu(nvml)
    import torch

    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return header_of(card, driver_version(nvml), torch.version.cuda, cudnn)


def measure_one(row: dict[str, Any], seconds: float) -> dict[str, Any]:
    return measure_apart(RunRequest(row=row), timeout=seconds)


def measure_context(seconds: float = 120.0) -> dict[str, int]:
    """Return the bytes outside PyTorch's allocator in a new process on the real GPU, after each library's first use."""
    local_gpu()
    sizes = apart("ullage.measuring.machine:context_here", {}, RunRequest(), {}, seconds, None)
    if "failed" in sizes:
        raise UllageError(f"the context could not be measured: {sizes['failed']}")
    return sizes


def context_here(request: dict[str, Any], read: Callable[[], int | None] | None = None) -> dict[str, int]:
    """In the child: measure a bare context, then with PyTorch's kernels, cuBLAS and cuDNN. `read` replaces NVML."""
    import torch

    from ullage.measuring.single_run import process_memory

    ask = read or process_memory
    sizes: dict[str, int] = {}

    def note(name: str) -> None:
        torch.cuda.synchronize()
        taken = ask()
        if taken is None:
            raise RuntimeError("NVML does not say how much this process takes (containers and WSL hide it)")
        sizes[name] = taken - torch.cuda.memory_reserved()

    torch.cuda.init()
    note("bare")
    image = torch.randn(2, 8, 32, 32, device="cuda", requires_grad=True)
    (image * 2).sum().backward()
    note("kernels")
    flat = image.reshape(2, -1)
    (flat @ flat.t()).sum().backward()
    note("matrix products")
    torch.nn.Conv2d(8, 8, 3, device="cuda")(image).sum().backward()
    note("convolutions")
    return sizes


def as_own_card(measured: dict[str, int], base: str) -> str:
    """Return a file for `$ULLAGE_HOME/gpus` with the measured values."""
    bare, used = measured["bare"] >> 20, max(measured.values()) >> 20
    sizes = {"context": used, "context_bare": bare, "context_upper": used + 40}
    lines = [f'base = "{base}"', *(f"{name}_mib = {size}" for name, size in sizes.items())]
    return "\n".join([*lines, 'context_source = "ullage measure context"'])
