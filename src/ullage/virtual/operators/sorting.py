"""Sorting along a dimension, running sums, and the temporary storage of the CUB algorithms behind them.

aten/src/ATen/native/cuda/Sort.cpp, SortStable.cu, Sorting.cpp, ScanKernels.cpp. The formulas are CUB's own
(cub/device/dispatch/dispatch_*.cuh and tuning/tuning_*.cuh, CUDA 13.0), with the tile sizes of the GPU's generation:
threads of a block times items of a thread. CUB packs its buffers at multiples of 256 bytes and adds 255 for alignment.
PyTorch counts elements in 64 bits.

Not covered: sorts of 1- and 2-byte keys before compute capability 9.0, which use another algorithm there (the formula
of the newer one is used), and the retuned tiles of compute capability 10.0.
"""

import math

import torch

from ullage.hardware import GPU
from ullage.units import ceil_div, round_up
from ullage.virtual.call.plan import Call, Plan, Steps, bytes_of, copy_size, is_dense, kernel, twin

_ALIGNMENT = 256
_COUNT = 8  # bytes of a count of elements
_RADIX_BITS, _RADIX_DIGITS = 8, 256
_WARP = 32


def _packed(*sizes: int) -> int:
    """util_device.cuh, AliasTemporaries."""
    return sum(round_up(size, _ALIGNMENT) for size in sizes) + _ALIGNMENT - 1


def _generation(gpu: GPU) -> int:
    return min(9, max(7, gpu.capability[0]))


# tuning_radix_sort.cuh: threads and items (for 4-byte types) of keys with values of 0 or 8 bytes
_SMALL_KEYS = {
    (1, 0): (512, 19),
    (2, 0): (512, 19),
    (1, 8): (384, 18),
    (2, 8): (512, 23),
    (1, 4): (512, 14),
    (2, 4): (512, 12),
}


def _onesweep_tile(key: int, value: int, generation: int) -> int:
    if generation >= 9:
        if key < 4:
            threads, items = _SMALL_KEYS.get((key, value), (384, 23))
        elif key == 4:
            threads, items = 384, 19 if not value else 17 if value < 8 else 29
        else:
            threads, items = 384, 30 if value < 8 else 24
    elif generation == 8:
        threads, items = 384, 17 if key == 4 and value else 21
    else:
        threads, items = 256, 46 if key == value == 4 else 23
    return threads * max(1, items * 4 // max(4, key, value))


def radix_sort(count: int, key: int, value: int, bits: int, gpu: GPU) -> int:
    """cub::DeviceRadixSort::SortPairs (or SortKeys, with a value of 0 bytes), out of place, on the lowest `bits`."""
    if count == 0:
        return 1
    if count <= 256 * max(1, 19 * 4 // max(4, key, value)):
        return 1  # one block sorts everything
    passes = ceil_div(bits, _RADIX_BITS)
    blocks = ceil_div(count, _onesweep_tile(key, value, _generation(gpu)))
    again = passes > 1  # the result of a pass needs a buffer
    return _packed(
        passes * _RADIX_DIGITS * _COUNT,
        blocks * _RADIX_DIGITS * 4,
        count * key if again else 0,
        count * value if again else 0,
        passes * 4,
    )


def _tile_states(count: int, tile: int, itemsize: int, one_word: bool = True) -> int:
    """agent/single_pass_scan_operators.cuh: messages between blocks, one entry a tile and 32 more."""
    entries = ceil_div(count, tile) + _WARP
    if one_word:
        return _packed(_packed(entries * 2 * max(2, itemsize)))
    return _packed(_packed(entries * 4, entries * itemsize, entries * itemsize))


def scan(count: int, itemsize: int, is_plain_number: bool = True) -> int:
    """cub::DeviceScan with PyTorch's own operator; half precision is a separate class there."""
    items = max(1, min(15 * 4 // itemsize, 30))
    return _tile_states(count, 128 * items, itemsize, is_plain_number)


def reduce(count: int, itemsize: int, gpu: GPU) -> int:
    """cub::DeviceReduce: one number for each block of a full card, unless one block suffices."""
    if count <= 256 * 16:
        return 1
    blocks = gpu.multiprocessors * (gpu.threads_per_sm // 256)
    return _packed(blocks * 5 * itemsize)


def select(count: int) -> int:
    """cub::DeviceSelect::Flagged: 16 bytes a tile."""
    return _packed((ceil_div(count, 256 * 10) + _WARP) * 16)


def merge_sort(count: int, key: int, value: int) -> int:
    """cub::DeviceMergeSort::SortPairs, which Thrust uses for any comparison but a plain "less than"."""
    tile = 512 * max(1, 17 * 4 // max(4, key))
    return _packed((ceil_div(count, tile) + 1) * _COUNT, count * key, count * value)


_UNIQUE_TILES = {(9, 8): 640 * 7, (9, 4): 512 * 14, (8, 8): 256 * 7, (8, 4): 256 * 11, (7, 8): 64 * 5, (7, 4): 64 * 11}


def unique_by_key(count: int, key: int, gpu: GPU) -> int:
    """cub::DeviceSelect::UniqueByKey with 32-bit values."""
    return _tile_states(count, _UNIQUE_TILES[_generation(gpu), key], _COUNT)


def unique_by_key_in_place(count: int, key: int, gpu: GPU) -> int:
    """thrust::unique_by_key with 64-bit values: states of the tiles, and the number of remaining elements."""
    tile = 448 * 22 if _generation(gpu) >= 9 else _UNIQUE_TILES[_generation(gpu), key]
    return _packed(_packed((ceil_div(count, tile) + _WARP) * 16), _COUNT)


# tuning_scan_by_key.cuh: keys and sums of 8 bytes each, or of 4
_BY_KEY_TILES = {
    (9, 8): 224 * 11,
    (9, 4): 288 * 14,
    (8, 8): 224 * 10,
    (8, 4): 256 * 15,
    (7, 8): 256 * 9,
    (7, 4): 256 * 9,
}


def scan_by_key(count: int, key: int, gpu: GPU) -> int:
    """cub::DeviceScan::InclusiveSumByKey, values as long as keys: 16 bytes a tile, and each tile's first key."""
    tiles = ceil_div(count, _BY_KEY_TILES[_generation(gpu), key])
    return _packed((tiles + _WARP) * 16, (tiles + 1) * key)


_SMALL = 4096  # Sort.cpp, should_use_small_sort: up to this number of elements are sorted in place by one block
_INDEX = 8  # bytes of an index
_FEW_SEGMENTS, _LONG_SEGMENT = 128, 1_000_000  # SortStable.cu, launch_stable_sort_kernel


@kernel("aten.sort.default", "aten.sort.stable")
def sort(call: Call) -> Plan:
    """Sort.cpp, sort_cuda_kernel."""
    dim = call.argument(2 if call.func._overloadname == "stable" else 1, "dim", -1)
    steps = Steps().output(0, 1)
    add_sort(steps, call, call.args[0], dim)
    return steps.plan(*call.infer().outputs)


def add_sort(steps: Steps, call: Call, source: torch.Tensor, dim: int) -> None:
    """Add the temporaries of sorting, besides its two outputs."""
    if source.dim() == 0 or source.numel() == 0:
        return
    length = source.shape[dim]
    if length <= _SMALL:
        steps.temporary(length * _INDEX).free(-1)
        return
    copies = []
    if not (is_dense(source.shape, source.stride()) and source.stride(dim) == 1):
        size = bytes_of(source)
        copies = [steps.take(size), steps.take(size), steps.take(source.numel() * _INDEX)]
    _add_large_sort(steps, call, source, length)
    steps.free(*reversed(copies))


def _add_large_sort(steps: Steps, call: Call, source: torch.Tensor, length: int) -> None:
    """SortStable.cu, launch_stable_sort_kernel: one segment after another, all at once by two sorts, or segmented."""
    key, count = source.element_size(), source.numel()
    segments = count // length
    if segments == 1 or length >= _LONG_SEGMENT:
        steps.temporary(length * _INDEX)
        for _ in range(segments):
            steps.temporary(radix_sort(length, key, _INDEX, 8 * key, call.gpu)).free(-1)
        steps.free(-1 - segments)
    elif segments < _FEW_SEGMENTS:
        first, second = steps.take(count * _INDEX), steps.take(count * _INDEX)
        steps.temporary(count * key, radix_sort(count, key, _INDEX, 8 * key, call.gpu)).free(-1, -2)
        bits = max(1, math.ceil(math.log2(segments)))
        steps.temporary(radix_sort(count, _INDEX, 0, bits, call.gpu)).free(-1, second, first)
    else:
        # cub::DeviceSegmentedRadixSort::SortPairs, out of place: room for keys and values once more
        steps.temporary(count * _INDEX, _packed(count * key, count * _INDEX)).free(-1, -2)


# TensorTopK.cu: rows and their lengths from which several blocks share a row; threads of a block; registers of a
# thread, which limit the blocks of a multiprocessor; bounds of the items that a thread reads; radix digits.
_SHARED_ROWS = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
_SHARED_ROWS_BEYOND = 400
_THREADS, _REGISTERS, _FEWEST_ITEMS, _MOST_ITEMS, _DIGITS = 256, 40, 4, 64, 256
_REGISTERS_A_MULTIPROCESSOR = 65536


@kernel("aten.topk.default")
def topk(call: Call) -> Plan:
    """TensorTopK.cu, and Sorting.cpp, topk_out_cuda: found, then sorted if requested."""
    source, values = call.args[0], call.output
    dim = call.argument(2, "dim", -1)
    steps = Steps().output(0, 1)
    if source.dim() == 0 or source.numel() == 0:
        return call.infer()
    copy = steps.take(copy_size(source))
    length = source.shape[dim]
    rows = source.numel() // length
    if length >= next((least for most, least in _SHARED_ROWS if rows <= most), _SHARED_ROWS_BEYOND):
        _add_shared_search(steps, call, source, rows, length)
    if call.argument(4, "sorted", True) and values.size[dim] > _SMALL:
        count, itemsize = values.nbytes // values.dtype.itemsize, values.dtype.itemsize
        sorted_places, sorted_values = steps.take(count * _INDEX), steps.take(count * itemsize)
        add_sort(steps, call, torch.empty(values.size, dtype=values.dtype, device="meta"), dim)
        steps.temporary(count * _INDEX).free(-1, sorted_values, sorted_places)
    return steps.free(copy).plan(*call.infer().outputs)


def _add_shared_search(steps: Steps, call: Call, source: torch.Tensor, rows: int, length: int) -> None:
    """TensorTopK.cu, mbtopk::launch: counters that the blocks of a row share."""
    blocks_at_once = _REGISTERS_A_MULTIPROCESSOR // (_REGISTERS * _THREADS) * call.gpu.multiprocessors
    items = min(max(ceil_div(length * rows, blocks_at_once * _THREADS), _FEWEST_ITEMS), _MOST_ITEMS)
    blocks = rows * ceil_div(length, items * _THREADS)
    taken = (
        rows * source.element_size(),
        2 * rows * 4,
        2 * rows * max(4, source.element_size()),
        blocks * _DIGITS * 2,
        rows * _DIGITS * 4,
        blocks * 4,
        blocks * 4,
    )
    steps.temporary(*taken)
    for _ in range(2):
        steps.temporary(scan_by_key(blocks, 4, call.gpu)).free(-1)
    steps.free(*range(-3, -3 - len(taken), -1))


@kernel("aten.cumsum.default", "aten.cumprod.default", "aten.logcumsumexp.default")
def running_sum(call: Call) -> Plan:
    """ScanKernels.cpp, scan_dim: a cast or a contiguous copy first; one row alone is scanned by CUB."""
    source, out = call.args[0], call.output
    steps = Steps().output(0)
    if source.dtype is not out.dtype:
        steps.temporary(source.numel() * out.dtype.itemsize)
        source = torch.empty_like(twin(source), dtype=out.dtype)
    length = source.shape[call.args[1]] if source.dim() else 1
    if source.numel() == length and source.numel() > 0 and source.dim():
        plain = source.dtype not in (torch.float16, torch.bfloat16)
        steps.temporary(scan(source.numel(), source.element_size(), plain))
    else:
        steps.copies(source)
    return steps.plan(out)
