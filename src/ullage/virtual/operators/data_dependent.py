"""Operators whose output shape depends on data: by known values, or by an assumed shape with a note."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ullage.virtual.call.plan import contiguous_strides, gpu_handler, handler
from ullage.virtual.operators import sorting
from ullage.virtual.operators.gradient_sums import called_by_engine
from ullage.virtual.operators.sorting import radix_sort
from ullage.virtual.state import GPUState


@handler("aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default")
def index_by_mask(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """IndexingUtils.h, expandTensors: a mask of flags becomes the places where it is true."""
    source, indices = args[0], args[1]
    added = len(args) > 3 and args[3]
    if added and func is torch.ops.aten.index_put.default and source.is_cuda and called_by_engine(frames_up=3):
        # FunctionsManual.cpp, index_backward: in place, except under a dispatch mode
        with gpu.mode:
            return torch.ops.aten._index_put_impl_(source, indices, args[2], True, True)
    masks = (torch.bool, torch.uint8)
    if not source.is_cuda or not any(index is not None and index.dtype in masks for index in indices):
        return NotImplemented
    places: list[torch.Tensor | None] = []
    with gpu.mode:
        mask = indices[0]
        if (
            func is torch.ops.aten.index_put_.default
            and len(indices) == 1
            and mask.dtype is torch.bool
            and not added
            and args[2].numel() == 1
            and not args[2].is_cuda
            and mask.shape == source.shape[: mask.dim()]
        ):  # TensorAdvancedIndexing.cpp, canDispatchToMaskedFill
            return source.masked_fill_(mask.view(*mask.shape, *[1] * (source.dim() - mask.dim())), args[2].item())
        for index in indices:
            if index is not None and index.dtype in masks:
                places += list(torch.nonzero(index.to(source.device)).unbind(1))
            else:
                places.append(index)
        if len(args) > 2 and args[2].dim() and args[2].shape[0] not in (1, places[0].shape[0]):  # type: ignore[union-attr]
            places = [None if place is None else place[: args[2].shape[0]] for place in places]
        out = func(source, places, *args[2:], **kwargs)
        if func is torch.ops.aten.index.Tensor and len(indices) == 1 and gpu.values.known(mask) is None:
            gpu.assumed_sizes.assumed(_kind("nonzero", mask.shape), mask.dim(), out)
        return out


_COUNT = 4  # bytes


@gpu_handler("aten.nonzero.default")
def nonzero(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nonzero.cu: count first, then write. All elements are assumed nonzero, or as many as were written into zeros."""
    source = args[0]
    known = gpu.values.computed(func, args, kwargs)
    count = len(known[0]) if known is not None else _most(gpu, source, source.shape, "nonzero")
    _note_turns(gpu, source, "nonzero")
    size, stride = (count, source.dim()), (1, max(count, 1))  # CUDA writes it transposed
    with gpu.memory.holding(_COUNT):
        gpu.memory.take_in_turn(sorting.reduce(source.numel(), _COUNT, gpu.spec))
        out = gpu.memory.tensor(size, stride, torch.int64, count * source.dim() * 8)
        gpu.memory.take_in_turn(sorting.select(source.numel()))
    if known is not None:
        gpu.values.set(out, known[0])
    return out


def _most(gpu: GPUState, mask: torch.Tensor, size: torch.Size, what: str) -> int:
    """Return the assumed, largest number of true elements of a mask; `size` is that of the expanded mask."""
    marks, count = gpu.values.marks(mask), size.numel()
    implied = gpu.assumed_sizes.known.get(_kind(what, size))
    if implied is not None:
        gpu.note("shapes", f"{what} of {tuple(size)} assumed to have {implied} elements, as a later shape implies")
        return implied
    if marks is None or marks >= count or mask.shape != size:
        gpu.note("shapes", f"{what} of {tuple(size)} assumed to have all {count} elements")
        return count
    gpu.note("shapes", f"{what} of {tuple(size)} assumed to have {marks} elements, the number written into zeros")
    return marks


def _note_turns(gpu: GPUState, values: torch.Tensor, what: str) -> None:
    if gpu.values.is_supposed(values):
        gpu.note(
            "turns",
            f"{what}: topk of scores without data is assumed to choose each in turn, equally often; choices by "
            "random numbers use other random numbers",
        )


def _kind(what: str, size: torch.Size) -> str:
    return f"{what} of {tuple(size)}"


@gpu_handler("aten.masked_select.default")
def masked_select(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Select by a mask; all elements are assumed selected. CUDA uses `nonzero` and `index`."""
    source, mask = args
    size = torch.broadcast_shapes(source.shape, mask.shape)
    chosen = gpu.values.known(mask)
    known = gpu.values.computed(func, args, kwargs)
    if chosen is not None:
        count = int(torch.count_nonzero(chosen.expand(size)))
        _note_turns(gpu, mask, "masked_select")
    else:
        count = _most(gpu, mask, size, "masked_select")
    with gpu.memory.holding(max(1, count * len(size) * 8)):  # the indices
        out = gpu.memory.tensor((count,), (1,), source.dtype, count * source.element_size())
    if known is not None:
        gpu.values.set(out, known[0])
    elif chosen is None:
        gpu.assumed_sizes.assumed(_kind("masked_select", size), len(size), out)
    return out


def cut_as_asked(gpu: GPUState, source: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """Return the beginning of a tensor with an assumed first size, as long as a view of it needs (`x[mask].view(batch,
    3, size, size)`); else `None`."""
    if not gpu.assumed_sizes.is_assumed(source):
        return None
    row = source.shape[1:].numel()
    count = math.lcm(row, math.prod(length for length in shape if length >= 0))
    if -1 in shape and count:
        count *= source.numel() // count
    if not 0 < count < source.numel():
        return None
    gpu.assumed_sizes.note_length(source, count // row)
    with gpu.mode:
        return source[: count // row]


@gpu_handler(
    "aten._unique.default", "aten._unique2.default", "aten.unique_dim.default", "aten.unique_consecutive.default"
)
def unique(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find unique elements; all are assumed different."""
    source = args[0]
    known = gpu.values.computed(func, args, kwargs)
    if known is not None:
        return tuple(gpu.values.tensor(value) for value in known)
    gpu.note("shapes", f"values in unique of {tuple(source.shape)} are assumed to be all different")
    count, itemsize, memory = source.numel(), source.element_size(), gpu.memory
    # Unique.cu, compute_unique: sorted first, together with the places if requested.
    place = 8 if len(args) > 2 and (args[2] or args[3:4] == (True,)) else 0
    places = [max(1, count * place)] * 2 if place else []
    sorting_size = radix_sort(count, itemsize, place, 8 * itemsize, gpu.spec)
    with memory.holding(max(1, count * itemsize), *places, max(1, sorting_size)):
        pass
    values = memory.tensor((count,), (1,), source.dtype, count * source.element_size())
    inverse = memory.tensor(source.shape, contiguous_strides(source.shape), torch.int64, count * 8)
    counts = memory.tensor((count,), (1,), torch.int64, count * 8)
    return values, inverse, counts


@gpu_handler("aten.bincount.default")
def bincount(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count values; with an unknown largest value, assume `minlength`, or one bin per element."""
    source = args[0]
    known = gpu.values.computed(func, args, kwargs)
    if known is not None:
        _note_turns(gpu, source, "bincount")
        return gpu.values.tensor(known[0])
    minimum = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    bins = minimum or source.numel()
    gpu.note("unbounded shapes", f"bincount is assumed to have {bins} bins")
    return gpu.memory.tensor((bins,), (1,), torch.int64, bins * 8)


@gpu_handler("aten._padded_dense_to_jagged_forward.default")
def padded_to_jagged(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """NestedTensorTransformerFunctions.cu: one row for each place without padding, at most every place; the values
    outside the result are never filled."""
    padded, offsets = args[0], args[1]
    rows = args[2] if len(args) > 2 else kwargs.get("total_L")
    known = gpu.values.known(offsets[-1])
    if rows is None and known is not None:
        rows = int(known.max())
    if rows is None:
        rows = padded.shape[:-1].numel()
        gpu.note("shapes", f"a padded tensor of {tuple(padded.shape)} is assumed to have no padding")
    width = padded.shape[-1]
    nbytes = rows * width * padded.element_size()
    with gpu.memory.holding(nbytes):
        return gpu.memory.tensor((rows, width), (width, 1), padded.dtype, nbytes)


@gpu_handler("aten.repeat_interleave.Tensor")
def repeat_interleave(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat elements; the sum of the repeats is `output_size`, that of the known values, or one for each element."""
    repeats = args[0]
    known = gpu.values.computed(func, args, kwargs)
    if known is not None:
        return gpu.values.tensor(known[0])
    size = kwargs.get("output_size")
    if size is None:
        size = repeats.numel()
        gpu.note("unbounded shapes", f"each of {repeats.numel()} repeats of repeat_interleave is assumed to be one")
    return gpu.memory.tensor((size,), (1,), repeats.dtype, size * repeats.element_size())


@gpu_handler("aten._nested_tensor_from_mask_left_aligned.default")
def without_nested_tensors(gpu: GPUState, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer whether an encoder may omit padding in evaluation: no, because its lengths are data."""
    gpu.note("nested", "an encoder's padding counts in full; in evaluation PyTorch may skip it")
    return False
