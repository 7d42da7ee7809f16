"""How much temporary storage CUB's algorithms ask for. PyTorch takes it from its allocator for the time of one call.

Every formula is CUB's own (cub/device/dispatch/dispatch_*.cuh and tuning/tuning_*.cuh, CUDA 13.0), with the tile
sizes of the GPU's generation: threads of a block times items of a thread. CUB packs its buffers at multiples of 256
bytes and adds 255 for alignment. PyTorch counts elements in 64 bits.

Not covered: sorts of 1- and 2-byte keys before compute capability 9.0, which use another algorithm there (the
formula of the newer one is used), and the retuned tiles of compute capability 10.0.
"""

from __future__ import annotations

from typing import Any

_ALIGNMENT = 256
_COUNT = 8  # bytes of a count of elements
_RADIX_BITS, _DIGITS = 8, 256
_WARP = 32


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _packed(*sizes: int) -> int:
    """util_device.cuh, AliasTemporaries."""
    return sum(_aligned(size) for size in sizes) + _ALIGNMENT - 1


def _generation(gpu: Any) -> int:
    major: int = (gpu.spec.compute_capability or (9, 0))[0]
    return 9 if major >= 9 else max(7, major)


# tuning_radix_sort.cuh: threads and items (for 4-byte types) of keys with 0 or 8 bytes of value beside them
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


def radix_sort(count: int, key: int, value: int, bits: int, gpu: Any) -> int:
    """cub::DeviceRadixSort::SortPairs (or SortKeys, with a value of 0 bytes), out of place, on the lowest `bits`."""
    if count == 0:
        return 1
    if count <= 256 * max(1, 19 * 4 // max(4, key, value)):
        return 1  # one block sorts it all
    passes = -(-bits // _RADIX_BITS)
    blocks = -(-count // _onesweep_tile(key, value, _generation(gpu)))
    again = passes > 1  # the result of a pass needs a place
    return _packed(
        passes * _DIGITS * _COUNT,
        blocks * _DIGITS * 4,
        count * key if again else 0,
        count * value if again else 0,
        passes * 4,
    )


def segmented_radix_sort(count: int, key: int, value: int) -> int:
    """cub::DeviceSegmentedRadixSort::SortPairs, out of place: room for keys and values once more."""
    return _packed(count * key, count * value)


def bits_of(largest: int) -> int:
    """cub.cuh of PyTorch, get_num_bits: how many bits the largest key has.

    >>> bits_of(168)
    8
    """
    return max(1, largest.bit_length())


def _tile_states(count: int, tile: int, itemsize: int, one_word: bool = True) -> int:
    """agent/single_pass_scan_operators.cuh: what blocks tell each other, one entry a tile and 32 more."""
    entries = -(-count // tile) + _WARP
    if one_word:
        return _packed(_packed(entries * 2 * max(2, itemsize)))
    return _packed(_packed(entries * 4, entries * itemsize, entries * itemsize))


def scan(count: int, itemsize: int, is_plain_number: bool = True) -> int:
    """cub::DeviceScan with PyTorch's own operator; half precision is a class of its own there.

    >>> scan(128, 8), scan(1, 4)
    (1279, 1023)
    """
    items = max(1, min(15 * 4 // itemsize, 30))
    return _tile_states(count, 128 * items, itemsize, is_plain_number)


_UNIQUE_TILES = {(9, 8): 640 * 7, (9, 4): 512 * 14, (8, 8): 256 * 7, (8, 4): 256 * 11, (7, 8): 64 * 5, (7, 4): 64 * 11}


def unique_by_key(count: int, key: int, gpu: Any) -> int:
    """cub::DeviceSelect::UniqueByKey with 32-bit values."""
    return _tile_states(count, _UNIQUE_TILES[_generation(gpu), key], _COUNT)


# tuning_scan_by_key.cuh: keys and sums of 8 bytes each, or of 4
_BY_KEY_TILES = {
    (9, 8): 224 * 11,
    (9, 4): 288 * 14,
    (8, 8): 224 * 10,
    (8, 4): 256 * 15,
    (7, 8): 256 * 9,
    (7, 4): 256 * 9,
}


def scan_by_key(count: int, key: int, gpu: Any) -> int:
    """cub::DeviceScan::InclusiveSumByKey, values as long as keys: 16 bytes a tile, and each tile's first key."""
    tiles = -(-count // _BY_KEY_TILES[_generation(gpu), key])
    return _packed((tiles + _WARP) * 16, (tiles + 1) * key)
