"""Dynamo on the virtual GPU: what traces a function is PyTorch's own, and must see nothing of Ullage.

A compiled function is called in two parts. Dynamo traces it and hands graphs to a backend, for which the virtual GPU's
mode is set aside, since shapes are all that is asked for. Then the compiled program runs, under the mode. The hooks by
which the virtual GPU knows modules and optimizers belong to no program: Dynamo would trace them, or compile anew
because they are there, so they are set aside while a compiled function runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from ullage.virtual.replacements import Replacements
from ullage.virtual.state import GPUState

_CONTEXT_ELEMENT = 4  # bytes of the tensor with which FakeTensor makes sure that CUDA has a context

_HOOKS = (
    (module_hooks, ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called")),
    (optimizer_hooks, ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")),
)


def install(gpu: GPUState, replacements: Replacements) -> None:
    """Let Dynamo work as soon as somebody imports it."""
    replacements.when_imported(
        "torch._dynamo.eval_frame", lambda module: _set_hooks_aside(gpu, replacements, module)
    )
    replacements.when_imported(
        "torch._subclasses.fake_tensor", lambda module: _make_context(gpu, replacements, module)
    )


def _make_context(gpu: GPUState, replacements: Replacements, module: ModuleType) -> None:
    seen: set[Any] = set()

    def init_gpu_context(device: Any = None) -> None:
        """The real one makes a tensor, once for each device."""
        if device not in seen:
            seen.add(device)
            gpu.memory.give_back(gpu.memory.take(_CONTEXT_ELEMENT))

    for name in ("init_gpu_context", "init_cuda_context"):
        replacements.put_existing(module, name, init_gpu_context)
    # Constants stay on the CPU until the program runs, as where PyTorch has no GPU to make them on.
    replacements.put(module.FakeTensorMode, "avoid_device_init", property(lambda self: True))


def _set_hooks_aside(gpu: GPUState, replacements: Replacements, module: ModuleType) -> None:
    kind = module._TorchDynamoContext
    make = kind.__init__

    def enter() -> Callable[[], None]:
        """Called before a compiled function, and what it returns after it."""
        taken = [(hooks, dict(hooks)) for owner, names in _HOOKS for hooks in (getattr(owner, name) for name in names)]
        for hooks, _ in taken:
            hooks.clear()

        def leave() -> None:
            for hooks, before in taken:
                added = dict(hooks)
                hooks.clear()
                hooks.update(before | added)

        return leave

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.enter_exit_hooks.append(enter)

    replacements.put(kind, "__init__", __init__)
    made_before = [made for made in gc.get_objects() if isinstance(made, kind)]
    for context in made_before:
        context.enter_exit_hooks.append(enter)
    replacements.on_undo(lambda: [context.enter_exit_hooks.remove(enter) for context in made_before] and None)
