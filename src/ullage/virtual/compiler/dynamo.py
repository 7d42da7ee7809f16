"""Dynamo on the virtual GPU: PyTorch's own tracing, which must not see Ullage.

Dynamo traces a function and passes graphs to a backend; the virtual GPU's mode is disabled for that, since only shapes
are needed. Then the compiled program runs under the mode. The hooks by which the virtual GPU recognizes modules and
optimizers are disabled while a compiled function runs: Dynamo would trace them, or recompile because of them.
"""

import contextlib
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import _disable_current_modes

from ullage.virtual.call.replacements import Replacements
from ullage.virtual.cudnn.layouts import Operand, prefers_channels_last
from ullage.virtual.releases import release_of
from ullage.virtual.state import GPUState

_CONTEXT_ELEMENT = 4  # bytes of the tensor with which FakeTensor makes sure that CUDA has a context
_FAILED = "torch.compile failed here, so the eager code was followed: {error}"
_COMPILED = "torch.compile was followed as PyTorch {version} compiles it (other releases do otherwise): {functions}"
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep  # ullage.virtual: models that Ullage makes are like others
_HOOKS = (
    (module_hooks, ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called")),
    (module_hooks, ("_global_module_registration_hooks",)),  # a slice of a `ModuleList` is one more module
    (optimizer_hooks, ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")),
)


def install(gpu: GPUState, replacements: Replacements) -> None:
    for module, part in {
        "torch._subclasses.fake_tensor": _make_context,
        "torch._subclasses.fake_impls": _lay_out_convolutions,
        "torch.fx.experimental.proxy_tensor": _make_constants_on_the_card,
        "torch._dynamo.eval_frame": _set_hooks_aside,
        "torch._dynamo.convert_frame": _compile_under_the_mode,
        "torch._dynamo.guards": _check_under_the_mode,
        "torch._dynamo.output_graph": _note_graphs_that_fail,
        "torch._dynamo.device_interface": _forget_device,
        "torch._dynamo.variables.optimizer": _begin_state_on_the_card,
    }.items():
        replacements.when_imported(module, functools.partial(part, gpu, replacements))
    _forget_compiled()
    replacements.on_undo(_forget_compiled)


def _forget_compiled() -> None:
    """Drop code compiled for another card. Resetting Dynamo with nothing compiled would import all of Inductor."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and frames.input_codes.seen:
        sys.modules["torch._dynamo"].reset()


def _make_context(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    seen: set[Any] = set()

    def init_gpu_context(device: Any = None) -> None:
        """Make a tensor once for each device, as PyTorch does."""
        if device not in seen:
            seen.add(device)
            gpu.memory.take_in_turn(_CONTEXT_ELEMENT)

    for name in ("init_gpu_context", "init_cuda_context"):
        replacements.put_existing(module, name, init_gpu_context)
    # Constants stay on the CPU until the program runs, as in a PyTorch without a GPU.
    replacements.put(module.FakeTensorMode, "avoid_device_init", property(lambda self: True))


def _lay_out_convolutions(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Report cuDNN's layouts, which a build without cuDNN lacks: Inductor would expect a different result."""
    determine = torch._C._conv_determine_backend_memory_format

    def numbers(sizes: Any) -> tuple[int, ...]:
        return tuple(size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes)

    def plain(tensor: Any) -> Operand:
        return Operand(numbers(tensor.shape), numbers(tensor.stride()), tensor.dtype)

    def memory_format(source: Any, weight: Any, backend: Any) -> Any:
        device = getattr(source, "fake_device", None)
        if device is None or device.type != "cuda":
            return determine(source, weight, backend)
        if not prefers_channels_last(plain(source), plain(weight)):
            return torch.contiguous_format
        return torch.channels_last if source.dim() == 4 else torch.channels_last_3d

    replacements.put(torch._C, "_conv_determine_backend_memory_format", memory_format)


def _make_constants_on_the_card(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Compute expressions of constants on the virtual GPU: Dynamo does so while it traces, outside of its modes."""
    leave_fakes = module.unset_fake_temporarily

    @contextlib.contextmanager
    def unset_fake_temporarily() -> Iterator[Any]:
        with leave_fakes() as before, gpu.mode:
            yield before

    replacements.put(module, "unset_fake_temporarily", unset_fake_temporarily)


def _set_hooks_aside(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    kind = module._TorchDynamoContext
    make = kind.__init__

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.enter_exit_hooks.append(_without_hooks)

    replacements.put(kind, "__init__", __init__)
    made_before = [made for made in gc.get_objects() if isinstance(made, kind)]
    for context in made_before:
        context.enter_exit_hooks.append(_without_hooks)
        replacements.on_undo(functools.partial(context.enter_exit_hooks.remove, _without_hooks))


def _without_hooks() -> Callable[[], None]:
    """Disable the global hooks; return a function that restores them."""
    aside = [(hooks, dict(hooks)) for owner, names in _HOOKS for hooks in (getattr(owner, name) for name in names)]
    for hooks, _ in aside:
        hooks.clear()

    def put_back() -> None:
        for hooks, before in aside:
            added = dict(hooks)
            hooks.clear()
            hooks.update(before | added)

    return put_back


def _compile_under_the_mode(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    # Up to PyTorch 2.8 a mode cannot declare that its code may be compiled.
    replacements.put_existing(module, "is_in_torch_dispatch_mode", lambda include_infra_modes=True: False)
    translate = module.CatchErrorsWrapper.__call__
    as_it_is: Any = getattr(module, "ConvertFrameReturn", lambda: None)
    times: list[float] = []

    @functools.wraps(translate)
    def __call__(self: Any, frame: Any, *args: Any, **options: Any) -> Any:
        """Translate one frame; run it unchanged if that fails, or if it is Ullage's own, called by PyTorch."""
        if frame.f_code.co_filename.startswith(_OURS):
            return as_it_is()
        begin = time.monotonic()
        try:
            with _disable_current_modes():  # Dynamo does so itself, but not inside of DDP
                done = translate(self, frame, *args, **options)
        except (module.exc.Unsupported, torch.OutOfMemoryError):
            raise
        except Exception as error:
            gpu.note("compile failed", _FAILED.format(error=_first_line(error)))
            return as_it_is()
        if getattr(done, "guarded_code", done) is not None:
            times.append(time.monotonic() - begin)
            gpu.note_instead("compiled", _COMPILED.format(version=torch.__version__, functions=_functions(times)))
        return done

    replacements.put(module.CatchErrorsWrapper, "__call__", __call__)
    compile_code = module._compile

    @functools.wraps(compile_code)
    def _compile(code: Any, *args: Any, **options: Any) -> Any:
        after = f", after {_functions(times)}" if times else ""
        gpu.doing(f"compiling {code.co_qualname}{after}")
        try:
            with gpu.compiling.running():
                return compile_code(code, *args, **options)
        finally:
            gpu.doing("")

    replacements.put(module, "_compile", _compile)


def _check_under_the_mode(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Make guards under Ullage's mode: up to PyTorch 2.9 a guard made without it would fail at every call."""
    if release_of(torch.__version__).version <= (2, 9):
        replacements.put_inside(module.CheckFunctionManager, "__init__", lambda: gpu.mode)


def _note_graphs_that_fail(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Note errors of Inductor for which Dynamo silently runs the function uncompiled."""
    compile_graph = module.OutputGraph._call_user_compiler

    @functools.wraps(compile_graph)
    def _call_user_compiler(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return compile_graph(self, *args, **options)
        except module.exc.Unsupported as error:
            gpu.note("compile failed", _FAILED.format(error=_first_line(error.__cause__ or error)))
            raise

    replacements.put(module.OutputGraph, "_call_user_compiler", _call_user_compiler)


def _functions(times: list[float]) -> str:
    return f"{len(times)} function{'s' if len(times) > 1 else ''} in {round(sum(times))} s"


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "inner_exception", None) or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0] if lines else ''}"


def _begin_state_on_the_card(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Make the state of a compiled optimizer on the virtual GPU: it is made, not traced, while its step is compiled."""
    call = module.OptimizerVariable.call_method

    def call_method(self: Any, tx: Any, name: str, *args: Any, **options: Any) -> Any:
        with gpu.mode if name == "_init_group" else contextlib.nullcontext():
            return call(self, tx, name, *args, **options)

    replacements.put(module.OptimizerVariable, "call_method", call_method)


def _forget_device(gpu: GPUState, replacements: Replacements, module: Any) -> None:
    """Clear PyTorch's caches of device properties, and of functions that existed when it was imported."""
    interface = module.CudaInterface

    def take_functions() -> None:
        module.caching_worker_device_properties.clear()
        for name, value in list(vars(interface).items()):
            function = value.__func__ if isinstance(value, staticmethod) else value
            if getattr(function, "__module__", None) == module.__name__:
                continue  # its own
            present: Any = getattr(torch.cuda, name, None) or getattr(torch.cuda, f"_{name}", None)
            if name == "get_raw_stream":
                present = getattr(torch._C, "_cuda_getCurrentRawStream", None)
            elif present is None:
                continue
            setattr(interface, name, staticmethod(present) if isinstance(value, staticmethod) else present)

    take_functions()
    replacements.when_undone(take_functions)
