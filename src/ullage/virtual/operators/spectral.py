"""Fourier transforms. aten/src/ATen/native/cuda/SpectralOps.cpp and CuFFTPlanCache.h are followed step by step."""

import math
from collections.abc import Sequence

import torch

from ullage.virtual.call.plan import Call, New, Plan, Steps, bytes_of, contiguous_strides, kernel, like, twin
from ullage.virtual.operators import cufft

_MOST_DIMENSIONS = 3  # of one transform of cuFFT
_COMPLEX = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}
_REAL = {value: key for key, value in _COMPLEX.items()}


def _one_transform(dims: Sequence[int]) -> bool:
    """use_optimized_cufft_path: all dimensions at once, except, for its speed, if they begin with the first two."""
    return not (len(dims) > _MOST_DIMENSIONS or (len(dims) >= 2 and list(dims[:2]) == [0, 1]))


class _Transforms:
    """The transforms of one call. Buffers alternate, so the output is known only at the end."""

    def __init__(self) -> None:
        self._taken: list[int] = []
        self._events: list[tuple[bool, int]] = []  # whether a buffer is allocated or freed, and its number

    def take(self, size: int) -> int:
        self._taken.append(size)
        self._events.append((True, len(self._taken) - 1))
        return len(self._taken) - 1

    def free(self, *buffers: int) -> None:
        self._events += [(False, buffer) for buffer in buffers]

    def plan(self, layout: torch.Tensor, output: int) -> Plan:
        """Return the plan of all requests, with one of the buffers as the output."""
        steps, places = Steps(), dict[int, int]()
        for taken, buffer in self._events:
            if not taken:
                steps.free(places[buffer])
            elif buffer == output:
                steps.output(0)
            else:
                places[buffer] = steps.take(self._taken[buffer])
        made = New(tuple(layout.shape), layout.stride(), layout.dtype, self._taken[output])
        return steps.plan(made)

    def run(self, source: torch.Tensor, size: Sequence[int], dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """_exec_fft: batch dimensions in front, by their strides, and joined; returns the layout of the output."""
        batch = [dim for dim in range(source.dim()) if dim not in dims]
        batch.sort(key=lambda dim: -source.stride()[dim])
        permuted = source.permute(*batch, *dims)
        count = math.prod(permuted.shape[: len(batch)])
        joined = permuted.reshape(count, *permuted.shape[len(batch) :])
        nbytes, copies = bytes_of(source), []
        if joined.untyped_storage()._cdata != source.untyped_storage()._cdata:
            copies.append(self.take(nbytes))
        lengths = [max(source.shape[dim], size[dim]) for dim in dims]
        if not _fits_cufft(joined, lengths):
            copies.append(self.take(nbytes))
            joined = torch.empty_like(joined, memory_format=torch.contiguous_format)
        out_size = [count, *[size[dim] for dim in dims]]
        workspace = self.take(workspace_of(joined, lengths, dtype))
        self.free(workspace, *reversed(copies))
        strides, inner = [0] * source.dim(), contiguous_strides(out_size)
        step = inner[0]
        for dim in reversed(batch):
            strides[dim], step = step, step * size[dim]
        for place, dim in enumerate(dims):
            strides[dim] = inner[place + 1]
        return torch.empty_strided(size, strides, dtype=dtype, device="meta")

    def run_complex(self, source: torch.Tensor, dims: Sequence[int], buffers: list[int], room: int) -> torch.Tensor:
        """Run complex transforms of three dimensions at a time, the smallest strides first; the last of `buffers` has
        the result, and a second one is allocated when needed."""
        rest, working = list(dims), source
        while rest:
            if len(buffers) < 2:
                buffers.append(self.take(room))
            else:
                buffers.reverse()
            rest.sort(key=lambda dim: -working.stride()[dim])
            working = self.run(working, source.shape, rest[-_MOST_DIMENSIONS:], source.dtype)
            del rest[-_MOST_DIMENSIONS:]
        return working


def _fits_cufft(joined: torch.Tensor, lengths: Sequence[int]) -> bool:
    """as_cufft_embed: whether each stride is a multiple of the next; other inputs are copied."""
    strides, size = joined.stride(), [joined.shape[0], *lengths]
    last = strides[-1]
    if last <= 0 or (size[0] != 1 and strides[0] == 0):
        return False
    for place in range(len(lengths) - 1, 0, -1):
        if size[place] == 1:
            continue
        if strides[place] <= 0 or strides[place] % last:
            return False
        last = strides[place]
    return True


def workspace_of(joined: torch.Tensor, lengths: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of cuFFT's workspace for a plan from this input to an output of this type."""
    if joined.numel() == 0:
        return 0
    kind = "c2r" if not dtype.is_complex else "c2c" if joined.dtype.is_complex else "r2c"
    number = joined.dtype if joined.dtype.is_complex else dtype
    strided = not joined.is_contiguous()
    precision = "d" if number is torch.complex128 else "s"
    return cufft.workspace(kind, precision, tuple(lengths), joined.shape[0], strided) * number.itemsize


@kernel("aten._fft_c2c.default")
def complex_to_complex(call: Call) -> Plan:
    """_fft_c2c_cufft"""
    source, dims = twin(call.args[0]), call.args[1]
    if not dims:
        return Steps().output(0).plan(like(call.args[0]))
    transforms, buffers = _Transforms(), list[int]()
    layout = transforms.run_complex(source, dims, buffers, bytes_of(source))
    transforms.free(*buffers[:-1])
    return transforms.plan(layout, buffers[-1])


@kernel("aten._fft_r2c.default")
def real_to_complex(call: Call) -> Plan:
    """_fft_r2c_cufft: one transform if cuFFT has it, else the last dimension first and complex ones after it."""
    source, dims, one_sided = twin(call.args[0]), list(call.args[1]), call.args[3]
    last, dtype = dims[-1], _COMPLEX[source.dtype]
    half, size = list(source.shape), list(source.shape)
    half[last] = source.shape[last] // 2 + 1
    room = math.prod(half if one_sided else size) * dtype.itemsize
    transforms = _Transforms()
    buffers, copies = [transforms.take(room)], []
    if call.args[0].storage_offset() % 2:  # cuFFT needs real numbers aligned as if they were complex
        copies.append(transforms.take(bytes_of(source)))
        source = source.movedim(last, -1).clone(memory_format=torch.contiguous_format).movedim(-1, last)
    if _one_transform(dims):
        layout = transforms.run(source, half if one_sided else size, dims, dtype)
    else:
        layout = transforms.run(source, half, [last], dtype)
        buffers.append(transforms.take(room))
        transforms.free(*copies)
        copies = []
        buffers.reverse()  # the second is written to next
        layout = transforms.run_complex(layout, dims[:-1], buffers, room)
        if not one_sided and half != size:  # the first half is copied to the other buffer, and mirrored there
            buffers.reverse()
            layout = torch.empty(size, dtype=dtype, device="meta")
    transforms.free(*copies, *buffers[:-1])
    return transforms.plan(layout, buffers[-1])


@kernel("aten._fft_c2r.default")
def complex_to_real(call: Call) -> Plan:
    """_fft_c2r_cufft: cuFFT overwrites its input, so that is a copy, or the result of the complex transforms."""
    source, dims, length = twin(call.args[0]), list(call.args[1]), call.args[3]
    size, dtype = list(source.shape), _REAL[source.dtype]
    size[dims[-1]] = length
    transforms, nbytes = _Transforms(), bytes_of(source)
    output = transforms.take(math.prod(size) * dtype.itemsize)
    if _one_transform(dims):
        buffers = [transforms.take(nbytes)]
        layout = transforms.run(source.contiguous(), size, dims, dtype)
    else:
        buffers = []
        working = transforms.run_complex(source, dims[:-1], buffers, nbytes)
        transforms.free(*buffers[:-1])
        del buffers[:-1]
        layout = transforms.run(working, size, dims[-1:], dtype)
    transforms.free(*buffers)
    return transforms.plan(layout, output)
