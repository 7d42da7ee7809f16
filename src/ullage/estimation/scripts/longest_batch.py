"""The largest batch that the data of a DataLoader holds: if lengths vary, memory runs out at the longest.

PyTorch's allocator also caches memory of the batches before it. A batch larger than all before finds no block that is
large enough, and smaller ones leave cached blocks. In random order, about ln n of n batches are larger than all before
them, and each leaves about 1/e of the others above itself. So Ullage also finds the batches at these places in the
order of sizes.

A forked process looks at the items for a few seconds, so that the script's random numbers, open files and data sets
stay as they are. The answer is a list of indices, which the loader then reads as if its sampler had drawn them.
"""

import contextlib
import itertools
import math
import os
import pickle
import random
import select
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.data._utils import fetch

FEW = 32  # items: if these are of one size, all are assumed to be
LONGEST_SURVEY = 5.0  # seconds
MOST_ITEMS = 100_000
MOST_BATCHES = 20_000
_DEEPEST = 6  # levels of an item's lists, dicts and objects
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class LongestBatch:
    """The indices of the largest batch, the shape of its largest tensor, and that of a drawn batch.

    `records` are batches that a long run meets before it, each larger than all before, smaller ones first.
    """

    indices: Any
    records: tuple[Any, ...] = ()
    shape: tuple[int, ...]
    drawn_shape: tuple[int, ...]
    looked_at: int
    items: int


def longest_batch(iterator: Any, seconds: float = LONGEST_SURVEY) -> LongestBatch | None:
    """Return the largest batch of a loader's iterator; `None` if all have one size, or it is unknown."""
    answers, child_answers = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a fork of a process with threads: the child starts none
        child = os.fork()
    if child == 0:
        _answer_in_child(iterator, seconds, child_answers)
    os.close(child_answers)
    try:
        return _read(answers, time.monotonic() + 2 * seconds)
    finally:
        os.close(answers)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _answer_in_child(iterator: Any, seconds: float, channel: int) -> None:
    """Look at the items and exit, so that nothing of the script runs twice."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        torch.set_num_threads(1)
        with contextlib.suppress(BaseException):
            answer = pickle.dumps(_survey(iterator, seconds))
            while answer:
                answer = answer[os.write(channel, answer) :]
    finally:
        os._exit(0)


def _read(channel: int, until: float) -> LongestBatch | None:
    parts = b""
    while select.select([channel], [], [], max(0.0, until - time.monotonic()))[0]:
        part = os.read(channel, _CHUNK)
        if not part:
            return pickle.loads(parts) if parts else None  # of this process's own fork
        parts += part
    return None


def _survey(iterator: Any, seconds: float) -> LongestBatch | None:
    end = time.monotonic() + seconds
    auto, sampler = iterator._auto_collation, iterator._index_sampler
    drawn: list[Any] = list(itertools.islice(iter(sampler), MOST_BATCHES))
    batches = drawn if auto else [[index] for index in drawn]
    every = list(dict.fromkeys(itertools.chain.from_iterable(batches)))[:MOST_ITEMS]
    seen_items = _look_at(iterator._dataset, every, end)
    sizes = {index: size for index, (size, _) in seen_items.items()}
    if len(set(sizes.values())) == 1:
        if len({len(batch) for batch in batches[:-1]}) <= 1:  # the last may be smaller
            return None
        sizes = dict.fromkeys(every, next(iter(sizes.values())))  # a sampler that draws more or fewer of them
    if not batches or not sizes:
        return None
    free = type(sampler) is BatchSampler and not isinstance(sampler.sampler, SequentialSampler)
    if free:
        candidates = [sorted(sizes, key=sizes.__getitem__, reverse=True)[: len(batches[0])]]
    else:
        seen = [batch for batch in batches if all(index in sizes for index in batch)] or batches[:1]
        total = max(seen, key=lambda batch: sum(sizes.get(index, 0) for index in batch))
        padded = max(seen, key=lambda batch: len(batch) * max(sizes.get(index, 0) for index in batch))
        candidates = [total, padded]
    fetcher = fetch._MapDatasetFetcher(iterator._dataset, auto, iterator._collate_fn, iterator._drop_last)

    def fetched(indices: list[Any]) -> tuple[int, tuple[int, ...]]:
        return size_of(fetcher.fetch(indices if auto else indices[0]))

    best = max(candidates, key=lambda batch: fetched(batch)[0])
    largest, drawn_sizes = fetched(best), [fetched(batch)[0] for batch in batches[:3]]
    if largest[0] <= min(drawn_sizes):
        return None  # collated, they are alike
    shapes = {index: shape for index, (_, shape) in seen_items.items()}
    before = [*_records(batches, sizes), *_uneven(batches, shapes, free)]
    return LongestBatch(
        indices=best if auto else best[0],
        records=tuple(batch if auto else batch[0] for batch in before),
        shape=largest[1],
        drawn_shape=fetched(batches[0])[1],
        looked_at=len(sizes),
        items=len(every),
    )


def _records(batches: list[Any], sizes: dict[Any, int]) -> list[Any]:
    """Return the batches that in a random order are expected to be larger than all batches before them.

    >>> _records([[n] for n in range(100)], {n: n for n in range(100)})
    [[63], [86], [95], [98]]
    """
    ordered = sorted(
        (batch for batch in batches if all(index in sizes for index in batch)),
        key=lambda batch: len(batch) * max((sizes[index] for index in batch), default=0),
    )
    places = (int(len(ordered) * (1 - math.exp(-many))) for many in range(1, int(math.log(len(ordered) or 1)) + 1))
    return [ordered[place] for place in places]


def _uneven(batches: list[Any], shapes: dict[Any, tuple[int, ...]], free: bool) -> list[Any]:
    """Return the batches of the widest and of the tallest items: models that scale images to one height or width, as
    detectors do, need more memory for these than for larger ones.

    >>> _uneven([[0], [1], [2]], {0: (3, 8, 9), 1: (3, 4, 12), 2: (3, 9, 6)}, free=True)
    [[1], [2]]
    """
    ratios = {index: shape[-1] / shape[-2] for index, shape in shapes.items() if len(shape) > 1 and min(shape[-2:]) > 1}
    sides = [{shape[place] for shape in shapes.values()} for place in (-2, -1)] if len(ratios) == len(shapes) else []
    if not sides or min(map(len, sides)) == 1:
        return []
    if free:
        ordered, many = sorted(ratios, key=ratios.__getitem__), len(batches[0])
        return [ordered[-many:], ordered[:many]]
    looked_at = [batch for batch in batches if batch and all(index in ratios for index in batch)]
    means = [sum(ratios[index] for index in batch) / len(batch) for batch in looked_at]
    return [looked_at[means.index(most)] for most in (max(means), min(means))] if means else []


def _look_at(dataset: Any, indices: list[Any], end: float) -> dict[Any, tuple[int, tuple[int, ...]]]:
    """Return size and shape of the items seen in time, in random order; of a few if these are all alike."""
    order = random.Random(0).sample(indices, len(indices))
    sizes: dict[Any, tuple[int, tuple[int, ...]]] = {}
    for index in order:
        sizes[index] = size_of(dataset[index])
        if time.monotonic() > end or (len(sizes) == FEW and len({size for size, _ in sizes.values()}) == 1):
            break
    return sizes


def size_of(value: Any) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of everything in an item or a batch, and the shape of the largest part."""
    parts = list(_parts(value, _DEEPEST))
    return sum(size for size, _ in parts), max(parts, default=(0, ()))[1]


def _parts(value: Any, depth: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    if isinstance(value, torch.Tensor):
        yield value.numel() * value.element_size(), tuple(value.shape)
    elif isinstance(value, str | bytes):
        yield len(value), (len(value),)
    elif isinstance(value, int | float) or value is None or depth == 0:
        yield 8, ()
    elif hasattr(value, "nbytes") and hasattr(value, "shape"):  # a NumPy array
        yield int(value.nbytes), tuple(value.shape)
    elif hasattr(value, "getbands"):  # an image of PIL
        yield value.width * value.height * len(value.getbands()), (value.height, value.width)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], int | float):
        yield 8 * len(value), (len(value),)
    else:
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else None
        for part in getattr(value, "__dict__", {}).values() if inside is None else inside:
            yield from _parts(part, depth - 1)
