"""What the workspace of a convolution can be made of, in bytes: copies of its tensors, padded in several ways, partial
results, and what the method of a plan keeps beside them: Fourier or Winograd transforms, the phases of a strided
gradient, tiles of results in single precision."""

from __future__ import annotations

from ullage.virtual.cudnn.formulas import (
    DATA,
    FILTER,
    FORWARD,
    ITEM_BYTES,
    PADDED,
    PLAIN,
    ConvolutionProblem,
    Terms,
    product,
    round_up,
)


def terms(problem: ConvolutionProblem) -> Terms:
    """What a workspace for this problem can be made of.

    >>> sizes = (1, 3, 8, 8), (16, 3, 3, 3), (1, 16, 8, 8)
    >>> layer = ConvolutionProblem("f", *sizes, (1, 1), (1, 1), (1, 1), 1, "f16", False)
    >>> terms(layer).source
    (0, 384, 1024)
    """
    groups, item = problem.groups, ITEM_BYTES[problem.kind]
    inner, outer = problem.source[1] // groups, problem.out[1] // groups
    rows = problem.source[0] * product(problem.source[2:]) * item
    out_rows = problem.out[0] * product(problem.out[2:]) * item
    taps = product(problem.weight[2:]) * item
    unit = 16 // item
    common = max(unit, 1 << (max(inner, outer) - 1).bit_length())
    channels = [(inner, outer), (round_up(inner, unit), round_up(outer, unit))]
    if groups > 1:
        channels.append((common, common))
    source = (0, *(rows * groups * width for width, _ in channels))
    out = (0, *(out_rows * groups * width for _, width in channels))
    weight = (0, *(taps * groups * width * height for width, height in channels))
    computed = {FORWARD: out, DATA: source, FILTER: weight}[problem.direction]
    partial = [size // item * 4 for size in computed]
    if problem.direction == FILTER and groups > 1:
        partial.append(round_up(groups * outer, 64) * inner * taps // item * 4)
    found = Terms(source, out, weight, tuple(partial), problem.source[0], groups)
    return found._replace(buffers=buffers(problem, found))


def buffers(problem: ConvolutionProblem, parts: Terms) -> tuple[int, ...]:
    """Bytes that the method of a plan keeps beside the copies of the tensors, by its place; 0 if it does not apply."""
    copies = (sum(sizes[padding] for sizes in (parts.source, parts.out, parts.weight)) for padding in (PLAIN, PADDED))
    tiles = (tile_bytes(problem, width) for width in (32, 64, 128))
    fourier = transform_bytes(problem) if transforms(problem) else 0
    methods = fourier, winograd_bytes(problem), phase_bytes(problem)
    needed = needed_copies(problem)
    spare = _SPARE if needed else 0
    by_groups = needed + spare, needed + spare * problem.groups
    at_once, packed = _copies_at_once(problem.groups, parts), _packed_copies(problem)
    singles = sum(sizes[PLAIN] for sizes in (parts.source, parts.out, parts.weight)) // ITEM_BYTES[problem.kind] * 4
    others = padded_phase_bytes(problem), winograd_bytes(problem, other=True), sample_bytes(problem), singles
    return (0, *methods, *tiles, *copies, *by_groups, *at_once, *packed, *others)


def packed_channels(inner: int, outer: int, groups: int) -> tuple[int, int]:
    """Channels of a group, and of all groups, where groups are packed for tensor cores: a power of two of them, as many
    inputs as outputs.

    >>> packed_channels(1, 1, 11), packed_channels(32, 16, 24)
    ((4, 48), (32, 768))
    """
    common = max(4, 1 << (max(inner, outer) - 1).bit_length())
    return common, round_up(groups * common, 8)


def _packed_copies(problem: ConvolutionProblem) -> tuple[int, int]:
    """Copies of all groups, packed, with and without those of the filter."""
    groups, item = problem.groups, ITEM_BYTES[problem.kind]
    if groups == 1:
        return 0, 0
    common, channels = packed_channels(problem.source[1] // groups, problem.out[1] // groups, groups)
    pixels = problem.source[0] * (product(problem.source[2:]) + product(problem.out[2:]))
    return channels * (pixels + common * product(problem.weight[2:])) * item, channels * pixels * item


GROUPS_AT_ONCE = 8


def _copies_at_once(groups: int, parts: Terms) -> tuple[int, int]:
    """Padded copies of as many groups as are computed at once, with and without those of the filter.

    >>> tensors = Terms((0, 10, 32), (0, 10, 16), (0, 10, 64), (0, 10, 64), 1, 16)
    >>> _copies_at_once(16, tensors)
    (56, 24)
    """
    if groups == 1:
        return 0, 0
    at_once = min(groups, GROUPS_AT_ONCE)
    tensors = (parts.source[PADDED] + parts.out[PADDED]) // groups * at_once
    return tensors + parts.weight[PADDED] // groups * at_once, tensors


_SPARE = 16  # bytes beside copies, to align them


def needed_copies(problem: ConvolutionProblem) -> int:
    """Copies of those tensors that tensor cores cannot read or write in place.

    They want channels last, in multiples of 16 bytes. A filter of one tap, and an image of one pixel, are the same in
    both layouts. Filters are also padded where only one of their numbers of channels is no such multiple.

    >>> sizes = (2, 8, 5, 5), (16, 8, 1, 1), (2, 16, 5, 5)
    >>> needed_copies(ConvolutionProblem("f", *sizes, (1, 1), (0, 0), (1, 1), 1, "f16", False))
    2400
    >>> needed_copies(ConvolutionProblem("f", *sizes, (1, 1), (0, 0), (1, 1), 1, "f16", True))
    0
    """
    groups, item = problem.groups, ITEM_BYTES[problem.kind]
    unit = 16 // item
    inner, outer = problem.source[1] // groups, problem.out[1] // groups
    wide, tall = round_up(inner, unit), round_up(outer, unit)
    turned = not problem.channels_last
    pixels, out_pixels, taps = (product(size[2:]) for size in (problem.source, problem.out, problem.weight))
    size = 0
    if wide > inner or (turned and pixels > 1 < problem.source[1]):
        size += problem.source[0] * groups * wide * pixels
    if tall > outer or (turned and out_pixels > 1 < problem.out[1]):
        size += problem.out[0] * groups * tall * out_pixels
    if wide > inner or tall > outer or (turned and taps > 1 < inner):
        size += groups * wide * tall * taps
    return size * item


def tile_bytes(problem: ConvolutionProblem, width: int) -> int:
    """The result in single precision, in tiles of 128 rows: of output channels for a forward pass.

    >>> sizes = (32, 64, 56, 56), (144, 64, 1, 1), (32, 144, 56, 56)
    >>> tile_bytes(ConvolutionProblem("f", *sizes, (1, 1), (0, 0), (1, 1), 1, "f32", True), 128)
    102760448
    """
    if problem.direction == FILTER:
        return 0
    batch, channels, *lengths = problem.out if problem.direction == FORWARD else problem.source
    rows = round_up(batch * product(tuple(lengths)), 128)
    return 4 * rows * problem.groups * round_up(channels // problem.groups, width)


_WINOGRAD_TILES = {3: 4, 5: 9}  # by the side of the filter: results along one side of a tile
_WINOGRAD_BATCH = 16  # of a multiple of so many samples


def winograd_bytes(problem: ConvolutionProblem, other: bool = False) -> int:
    """The workspace of plans by Winograd's transforms, of square filters with 3 or 5 taps along a side. In half
    precision they take samples in multiples; `other` ones do so for 5 taps alone, and copy tensors with channels last.

    >>> sizes = (26, 64, 71, 71), (64, 64, 3, 3), (26, 64, 71, 71)
    >>> winograd_bytes(ConvolutionProblem("w", *sizes, (1, 1), (1, 1), (1, 1), 1, "f32", False))
    155860992
    >>> sizes = (39, 80, 13, 13), (80, 80, 5, 5), (39, 80, 13, 13)
    >>> winograd_bytes(ConvolutionProblem("w", *sizes, (1, 1), (2, 2), (1, 1), 1, "f32", False), other=True)
    25093120
    """
    rows, columns = problem.weight[-2:]
    if len(problem.source) != 4 or rows != columns or rows not in _WINOGRAD_TILES:
        return 0
    if max(problem.stride) > 1 or max(problem.dilation) > 1:
        return 0
    groups, tile = problem.groups, _WINOGRAD_TILES[rows]
    inner, outer = problem.source[1] // groups, problem.out[1] // groups
    in_multiples = rows == 5 if other else problem.kind != "f32"
    batch = round_up(problem.source[0], _WINOGRAD_BATCH) if in_multiples else problem.source[0]
    height, width = problem.source[2:] if problem.direction == DATA else problem.out[2:]
    tiles = batch * -(-height // tile) * -(-width // tile)
    elements = tiles * (inner + outer) + inner * outer
    size = 4 * (tile + rows - 1) ** 2 * elements
    if other and problem.channels_last:
        tensors = problem.source[0] * (inner * product(problem.source[2:]) + outer * product(problem.out[2:]))
        weight = inner * outer * rows * columns * ITEM_BYTES[problem.kind]
        size += tensors * ITEM_BYTES[problem.kind] + round_up(weight + 1, _SPARE)
    return size * min(groups, GROUPS_AT_ONCE)


def phase_bytes(problem: ConvolutionProblem) -> int:
    """Copies of a strided data gradient as one without strides: pixels that a stride apart lie together are channels.

    >>> sizes = (16, 1024, 8, 8), (2048, 1024, 4, 4), (16, 2048, 4, 4)
    >>> phase_bytes(ConvolutionProblem("d", *sizes, (2, 2), (1, 1), (1, 1), 1, "f32", False))
    308281344
    """
    if problem.direction != DATA or max(problem.stride) == 1:
        return 0
    lengths, taps, out = _phases(problem)
    each = product(problem.source[:2]) * product(lengths) + product(problem.weight[:2]) * product(taps)
    return ITEM_BYTES[problem.kind] * (product(problem.stride) * each + product(problem.out[:2]) * product(out))


_PHASE_INPUTS, _PHASE_OUTPUTS = 2, 8  # channels of a group come in multiples of these


def padded_phase_bytes(problem: ConvolutionProblem) -> int:
    """The same with channels in multiples, for as many groups as are computed at once. Pixels that no tap reaches are
    left out, and the output is as long as a convolution without strides makes it.

    >>> sizes = (32, 9, 160, 64), (27, 9, 21, 21), (32, 27, 80, 32)
    >>> padded_phase_bytes(ConvolutionProblem("d", *sizes, (2, 2), (10, 10), (1, 1), 1, "f32", False))
    24212496
    >>> sizes = (256, 70, 49, 49), (70, 70, 2, 2), (256, 70, 24, 24)
    >>> padded_phase_bytes(ConvolutionProblem("d", *sizes, (2, 2), (0, 0), (1, 1), 1, "f32", False))
    207698704
    """
    if problem.direction != DATA or max(problem.stride) == 1:
        return 0
    groups, taps = problem.groups, _phases(problem)[1]
    reached = [
        (count - 1) * step + dilation * (length - 1) + 1 - padding
        for count, step, dilation, length, padding in zip(
            problem.out[2:], problem.stride, problem.dilation, problem.weight[2:], problem.padding, strict=True
        )
    ]
    lengths = tuple(
        -(-min(length, far) // step)
        for length, far, step in zip(problem.source[2:], reached, problem.stride, strict=True)
    )
    out = tuple(
        length + 2 * -(-padding // step) - tap + 1
        for length, tap, step, padding in zip(lengths, taps, problem.stride, problem.padding, strict=True)
    )
    inner = round_up(problem.source[1] // groups, _PHASE_INPUTS) * product(problem.stride)
    outer = round_up(problem.out[1] // groups, _PHASE_OUTPUTS)
    size = problem.source[0] * (inner * product(lengths) + outer * product(out)) + inner * outer * product(taps)
    return (ITEM_BYTES[problem.kind] * size + _SPARE) * min(groups, GROUPS_AT_ONCE)


_SAMPLE_UNIT, _SAMPLE_COPIES = 32, 8  # channels, and how many sums a sample has


def sample_bytes(problem: ConvolutionProblem) -> int:
    """Gradients of a depthwise convolution's filter, several for each sample.

    >>> sizes = (8, 787, 32, 32), (787, 1, 1, 1), (8, 787, 32, 32)
    >>> sample_bytes(ConvolutionProblem("w", *sizes, (1, 1), (0, 0), (1, 1), 787, "bf16", True))
    204800
    """
    channels = problem.weight[0]
    if problem.direction != FILTER or problem.groups == 1 or problem.weight[1] > 1 or channels != problem.groups:
        return 0
    filters = round_up(channels, _SAMPLE_UNIT) * product(problem.weight[2:])
    return 4 * _SAMPLE_COPIES * problem.source[0] * filters


def _phases(problem: ConvolutionProblem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Lengths of a strided data gradient once the stride has become channels: of the source, the filter and the output.

    >>> sizes = (16, 1024, 8, 8), (2048, 1024, 4, 4), (16, 2048, 4, 4)
    >>> _phases(ConvolutionProblem("d", *sizes, (2, 2), (1, 1), (1, 1), 1, "f32", False))
    ((4, 4), (3, 3), (4, 4))
    """
    lengths = tuple(-(-length // step) for length, step in zip(problem.source[2:], problem.stride, strict=True))
    taps = tuple(
        (step - 1 + padding) // step + (length - 1 - padding) // step + 1
        for length, padding, step in zip(problem.weight[2:], problem.padding, problem.stride, strict=True)
    )
    reached = tuple(length + tap - 1 for length, tap in zip(lengths, taps, strict=True))
    return lengths, taps, problem.out[2:] if taps[0] % 2 else reached


_TILE = 32  # lengths of the Fourier transforms by which a data gradient is computed
_TILE_BYTES = _TILE * (_TILE // 2 + 1) * 8
_LEAST_TRANSFORM, _LONGEST_TRANSFORM = 16, 256


def transform_bytes(problem: ConvolutionProblem) -> int:
    """The workspace of cuDNN's plans by Fourier transforms, by far the largest that `cudnn.benchmark` tries.

    Forward and filter gradient transform whole images, of the next power of two in length, twice each: once in either
    layout. Data gradients go tile by tile. A strided one is that of a filter with more channels. With channels last,
    and for groups, tensors are copied first.

    >>> sizes = (64, 1344, 14, 14), (2520, 1344, 1, 1), (64, 2520, 14, 14)
    >>> transform_bytes(ConvolutionProblem("f", *sizes, (1, 1), (0, 0), (1, 1), 1, "f32", False))
    8015099904
    """
    if len(problem.source) != 4:
        return 0
    groups = problem.groups
    batch, channels, height, width = problem.source
    inner, outer = channels // groups, problem.out[1] // groups
    rows, columns = problem.weight[2:]
    item = ITEM_BYTES.get(problem.kind, 8)
    source = batch * inner * height * width * item
    out = batch * outer * product(problem.out[2:]) * item
    weight = inner * outer * rows * columns * item
    copies = source + out + 16 + (weight if rows * columns > 1 else 0)
    through, kept, written = batch * inner, inner * outer, batch * outer
    if problem.direction == DATA:
        step = problem.stride[0]
        if step > 1:
            (height, width), (rows, columns), out_lengths = _phases(problem)
            through, kept = step * step * through, step * step * kept
            copies = through * height * width + written * product(out_lengths) + kept * rows * columns
            copies = copies * item + 16
        if max(rows, columns) > _TILE:
            return 0
        tiles = min(2, -(-height // (_TILE + 1 - rows)) * -(-width // (_TILE + 1 - columns)))
        size = _TILE_BYTES * (tiles * through + kept + tiles * written)
        if step > 1:
            return (size + copies) * min(groups, GROUPS_AT_ONCE)
    else:
        length = _LEAST_TRANSFORM
        while length < max(height + 2 * problem.padding[0], width + 2 * problem.padding[1]):
            length *= 2
        both = 2 * length * (length // 2 + 1) * 8
        if problem.direction == FORWARD:
            size = both * max(through + kept, written) + round_up(weight, 16)
        else:
            size = both * max(through + written, kept) + round_up(out, 16)
    if groups > 1:
        return (size + source + out + 16) * min(groups, GROUPS_AT_ONCE)
    return size + copies if problem.channels_last else size


def transforms(problem: ConvolutionProblem) -> bool:
    """Whether cuDNN has plans by Fourier transforms for such a problem at all; which it names is another question.

    >>> sizes = (1, 3, 8, 8), (16, 3, 3, 3), (1, 16, 8, 8)
    >>> transforms(ConvolutionProblem("f", *sizes, (1, 1), (1, 1), (1, 1), 1, "bf16", False))
    False
    """
    if len(problem.source) != 4 or problem.kind not in ("f32", "f16"):
        return False
    if problem.direction == DATA:
        return max(problem.weight[2:]) > 2 and max(problem.dilation) == 1
    lengths = (length + 2 * padding for length, padding in zip(problem.source[2:], problem.padding, strict=True))
    if problem.stride != (1, 1) or max(lengths) > _LONGEST_TRANSFORM:
        return False
    if any(taps > 1 < dilation for taps, dilation in zip(problem.weight[2:], problem.dilation, strict=True)):
        return False
    return problem.direction == FORWARD or problem.kind == "f32"
