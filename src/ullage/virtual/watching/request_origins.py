"""Origins of requests: the operator, the module and the pass (forward, backward, optimizer) of each.

Hooks of each module's forward pass give the module there. In the backward pass the running autograd node does: nodes
are numbered in the order of the forward pass, so a node belongs to the module whose forward pass was running at that
number. No module is kept alive: memory that a program drops must be freed as on a real GPU.
"""

import weakref
from bisect import bisect_right
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils.weak import WeakIdKeyDictionary

from ullage.virtual.memory.allocations import ACTIVATIONS, alive_from
from ullage.virtual.state import GPUState
from ullage.virtual.watching.lookups import Lookups
from ullage.virtual.watching.models import CalledModel, buffers_of, parameters_of
from ullage.virtual.watching.step_calls import BACKWARD, FORWARD, OPTIMIZER, OUTSIDE, PASSES

_COMPILED_FROM = "_orig_mod"  # torch._dynamo.eval_frame.OptimizedModule
_HIGHEST = 100  # containers around a module
NOWHERE = 0  # the module of requests outside any module
# Nodes that add up a weight's gradient have no number of their own; they run right after the node that made it.
_NO_NUMBER = 2**64 - 1

_graph_task = torch._C._current_graph_task_id
_current_node: Any = torch._C._current_autograd_node
_sequence: Any = torch._C._autograd._get_sequence_nr


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """The origin of a request: `module` is a path such as `layer3.4.conv2`, or `None` outside of modules."""

    operator: str
    module: str | None
    part: str  # one of PASSES
    module_class: str | None = None  # such as `Conv2d`


class RequestOrigins:
    def __init__(self, gpu: GPUState) -> None:
        self._gpu = gpu
        self.owners: dict[int, int] = {}  # of parameters, gradients and optimizer state: span index to module number
        self.follow_owners = False
        self._numbers: dict[tuple[str, int, int], int] = {}
        self._paths: list[tuple[str, str]] = [("", "")]  # by module number: the root's class and the path in it
        self.classes: list[str | None] = [None]  # by module number
        self.models: list[CalledModel] = []
        self._weights: set[int] = set()  # the indices of the spans that hold them
        self._parents: MutableMapping[Any, Any] = WeakIdKeyDictionary()  # a class may have an __eq__ of its own
        self._shapes: dict[int, list[int | None]] = {}  # by module number: of its first output
        self._calls: dict[int, tuple[int, int]] = {}  # of modules called from outside: the last forward pass
        self._entered = 0
        self._known: MutableMapping[Any, int] = WeakIdKeyDictionary()
        self._roots_with_children = 0
        self._stack: list[tuple[int, int]] = []  # module number and backward pass (-1: none) in which it was called
        self._sequences: list[int] = []  # of autograd nodes: from here on ...
        self._modules: list[int] = []  # ... this module was running
        self._last_backward = NOWHERE
        self._optimizer: int | None = None
        self.lookups = Lookups(gpu)

    @property
    def is_inside_module(self) -> bool:
        return bool(self._stack)

    @property
    def module(self) -> int:
        return self._stack[-1][0] if self._stack else NOWHERE

    def current(self) -> int:
        if self.lookups.on_request is not None:
            self.lookups.on_request()
        task = _graph_task()
        stack = self._stack
        if stack and stack[-1][1] == task:
            module, part = stack[-1][0], (FORWARD if task == -1 else BACKWARD)
        elif task != -1:
            module, part = self._of_node(), BACKWARD
        elif self._optimizer is not None:
            module, part = self._optimizer, OPTIMIZER
        else:
            module, part = NOWHERE, OUTSIDE
        key = (self._gpu.operator, module, part)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
        return number

    def table(self) -> list[tuple[str, int, int]]:
        return list(self._numbers)

    def module_names(self) -> list[str | None]:
        """Return paths by module number; with several models, each path begins with its model's class."""
        several = self._roots_with_children > 1
        return [
            None if not root else root if not path else f"{root}.{path}" if several else path
            for root, path in self._paths
        ]

    def origin(self, number: int) -> RequestOrigin:
        operator, module, part = self.table()[number]
        return RequestOrigin(operator, self.module_names()[module], PASSES[part], self.classes[module])

    def layers(self) -> list[dict[str, Any]]:
        """Return the modules of every model; see `Estimate.layers`."""
        bytes_of: dict[int, int] = {}
        modules = [module if part == FORWARD else NOWHERE for _, module, part in self.table()]
        for begin, end in self._calls.values():
            for span in alive_from(self._gpu.memory.spans, begin, end):
                module = modules[span.origin]
                if module != NOWHERE and span.kind == ACTIVATIONS:
                    bytes_of[module] = bytes_of.get(module, 0) + span.size
        return [row for model in self.models for row in model.layers(self._shapes, bytes_of)]

    def repeat_step(self, begin: int, end: int) -> None:
        """Record that the calls of a step, between these allocator calls, were repeated right after it."""
        for module, (entered, left) in self._calls.items():
            if entered >= begin:
                self._calls[module] = entered + end - begin, left + end - begin

    def install(self) -> Callable[[], None]:
        end = ExitStack()
        end.callback(self.lookups.install())
        for handle in (
            module_hooks.register_module_module_registration_hook(self._registered),
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
            optimizer_hooks.register_optimizer_step_pre_hook(self._begin_step),
            optimizer_hooks.register_optimizer_step_post_hook(self._end_step),
        ):
            end.callback(handle.remove)
        return end.close

    def _registered(self, module: Any, name: str, submodule: Any) -> None:
        if submodule is not None and name != _COMPILED_FROM:
            self._parents.setdefault(submodule, weakref.ref(module))

    def _enter(self, module: Any, args: Any) -> None:
        calls = self._gpu.calls
        calls.modules += 1
        calls.part = FORWARD
        number = self._known.get(module)
        if number is None:
            number = self._learn(module)
        if not self._stack:
            calls.begin_forward()
            self._entered = self._gpu.memory.clock
        self._stack.append((number, _graph_task()))
        self._mark(number)

    def _leave(self, module: Any, args: Any, out: Any) -> None:
        if self._stack:
            number, task = self._stack.pop()
            if number not in self._shapes:
                self._note_shape(number, out)
            if not self._stack and task == -1 and (torch.is_grad_enabled() or number not in self._calls):
                self._calls[number] = self._entered, self._gpu.memory.clock
        if not self._stack:
            self._gpu.calls.part = OUTSIDE
        self._mark(self.module)

    def _mark(self, number: int) -> None:
        sequence = _sequence()
        if self._sequences and sequence < self._sequences[-1]:  # another thread: its nodes are numbered anew
            self._sequences.clear()
            self._modules.clear()
        self._sequences.append(sequence)
        self._modules.append(number)

    def _learn(self, module: Any) -> int:
        """Name a module at its first call, and with a root all modules below it."""
        original = module._modules.get(_COMPILED_FROM)
        if original is not None:  # the result of `torch.compile` gets the name of the original
            number = self._known[module] = self._known.get(original) or self._learn(original)
            return number
        if self._stack:  # made while its parent was running, or kept outside of PyTorch's registry
            return self._name(module, *self._paths[self._stack[-1][0]], type(module).__name__)
        top = self._top(module)
        root = type(top).__name__
        children = False
        for path, below in top.named_modules():
            children |= path != ""
            if below not in self._known:
                self._name(below, root, path)
        self._roots_with_children += children
        self.models.append(CalledModel(top, self._known, self._gpu.memory, self._weights))
        return self._known[module]

    def _top(self, module: Any) -> Any:
        """Return the outermost module that contains this one, as long as it exists."""
        for _ in range(_HIGHEST):
            reference = self._parents.get(module)
            parent = reference() if reference is not None else None
            if parent is None or all(child is not module for child in parent.children()):
                return module
            module = parent
        return module

    def _note_shape(self, number: int, out: Any) -> None:
        first = next(iter(out.values()), None) if isinstance(out, dict) else out
        while isinstance(first, list | tuple) and first:
            first = first[0]
        if isinstance(first, torch.Tensor):
            self._shapes[number] = [size if isinstance(size, int) else None for size in first.shape]

    def _name(self, module: Any, root: str, *path: str) -> int:
        number = self._known[module] = len(self._paths)
        self._paths.append((root, ".".join(part for part in path if part)))
        self.classes.append(type(module).__name__)
        if self.follow_owners:
            for tensor in (*parameters_of(module), *buffers_of(module)):
                self._own(tensor, number)
        return number

    def _of_node(self) -> int:
        node = _current_node()
        number = node._sequence_nr() if node is not None else _NO_NUMBER
        if number != _NO_NUMBER:
            place = bisect_right(self._sequences, number) - 1
            self._last_backward = self._modules[place] if place >= 0 else NOWHERE
        return self._last_backward

    def _begin_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._gpu.calls.part = OPTIMIZER
        place = f"{type(optimizer).__name__}.step()", ""
        if place not in self._paths:
            self._paths.append(place)
            self.classes.append(None)
            for model in self.models:
                model.look()
        self._optimizer = self._paths.index(place)
        if self.follow_owners:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._own_like(parameter, [parameter.grad])

    def _end_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizer = None
        self._gpu.calls.part = OUTSIDE
        if self.follow_owners:
            for parameter, state in optimizer.state.items():
                if isinstance(state, dict):
                    self._own_like(parameter, list(state.values()))

    def _own_like(self, parameter: Any, others: list[Any]) -> None:
        span = self._gpu.memory.span_of(parameter)
        owner = self.owners.get(span.index) if span is not None else None
        for other in others:
            if owner is not None and isinstance(other, torch.Tensor) and other.layout is torch.strided:
                self._own(other, owner)

    def _own(self, tensor: Any, module: int) -> None:
        span = self._gpu.memory.span_of(tensor) if tensor.layout is torch.strided else None
        if span is not None:
            self.owners.setdefault(span.index, module)  # a shared weight belongs to the module that comes first
