"""Custom operators: those of a script, or of a package with compiled kernels.

An operator written in Python (`torch.library.custom_op`, `triton_op`, `Library.impl`) runs unchanged, and its
allocations are counted. If its code needs more than a virtual GPU has, its registered fake gives its outputs, as for a
compiled operator.
"""

from typing import Any

import torch

from ullage.errors import UnsupportedOperation
from ullage.virtual.call.native import any_on_gpu
from ullage.virtual.call.plan import Handler
from ullage.virtual.state import GPUState

OF_PYTORCH = ("aten", "prim", "prims", "higher_order")
_KEYS = ("CUDA", "CompositeExplicitAutograd")


def is_custom(func: Any) -> bool:
    return func.namespace not in OF_PYTORCH


def handler_of(func: Any) -> Handler | None:
    return _run_code if is_custom(func) and _key_of_code(func) is not None else None


def _key_of_code(func: Any) -> str | None:
    """Return the dispatch key with Python code that would run on a GPU."""
    name = func._schema.name.partition("::")[2]
    names = (f"{name}.{func._schema.overload_name}", name) if func._schema.overload_name else (name,)
    written: Any = torch.library._impls  # "namespace/operator/key" of each kernel in Python
    return next((key for key in _KEYS for name in names if f"{func.namespace}/{name}/{key}" in written), None)


def _run_code(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any_on_gpu((*args, *kwargs.values())):
        return NotImplemented
    key, refused = _key_of_code(func), gpu.refused
    try:
        with gpu.mode:
            return func._op_dk(getattr(torch._C.DispatchKey, str(key)), *args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if not _has_fake(func):
            raise
        gpu.refused = refused
        what = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        gpu.note("code", f"the code of {func} cannot run here ({what}): its fake gave the outputs")
        return NotImplemented


def _has_fake(func: Any) -> bool:
    definition: Any = torch._library.custom_ops.OPDEFS.get(func._schema.name)
    if definition is not None:
        return definition._abstract_fn is not None
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta"))


def without_fake(func: Any) -> UnsupportedOperation:
    """Return the error for an operator with unknown outputs."""
    if not is_custom(func):
        return UnsupportedOperation(
            f"the virtual GPU cannot follow {func}: PyTorch has no shape inference for it. Replace the operator."
        )
    arguments = [argument.name for argument in func._schema.arguments]
    tensors = [argument.name for argument in func._schema.arguments if "Tensor" in str(argument.type)]
    made = ", ".join([f"torch.empty_like({tensors[0] if tensors else 'x'})"] * len(func._schema.returns)) or "None"
    result = made if len(func._schema.returns) < 2 else f"({made})"
    return UnsupportedOperation(
        f"the virtual GPU cannot follow {func}: it is compiled code, and no fake is registered that says what it "
        f'returns. Register one, such as torch.library.register_fake("{func._schema.name}")(lambda '
        f"{', '.join(arguments)}: {result}), with the shapes that it really returns"
    )
