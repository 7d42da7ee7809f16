"""Collective operators of a process group of one: what comes out is what went in, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ullage.virtual.special import special

if TYPE_CHECKING:
    from ullage.virtual.gpu import VirtualGPU

# torch/csrc/distributed/c10d/Ops.cpp; their outputs are their first argument, written in place
_NAMES = sorted(
    {schema.name.split("::")[1] for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")}
)


@special(*(f"c10d.{name}.default" for name in _NAMES))
def collective(gpu: VirtualGPU, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the inputs to the outputs, where they are not the same tensors, and answer that it is done."""
    targets = list(_tensors(args[0]))
    if not any(tensor.is_cuda for tensor in targets):
        return gpu.host.call(func, args, kwargs)
    sources = list(_tensors(args[1])) if len(args) > 1 else []
    with gpu.counting(), torch.no_grad():
        for target, source in zip(targets, sources, strict=False):
            target.copy_(source.view_as(target))
            gpu.values.copied(source, target)
    returned = len(func._schema.returns)
    done = _work_that_is_done(targets)
    return None if returned == 0 else done if returned == 1 else (args[0], done)


def _work_that_is_done(results: list[torch.Tensor]) -> Any:
    c10d: Any = torch._C._distributed_c10d
    future: Any = torch.futures.Future()
    future.set_result(results)
    return c10d._create_work_from_future(future).boxed()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
