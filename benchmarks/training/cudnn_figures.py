"""Fits cuDNN's workspaces for batch normalization and recurrent networks to calls that were measured.

    python benchmarks/training/cudnn_figures.py recurrent benchmarks/data/recurrent*_h200.jsonl.gz
    python benchmarks/training/cudnn_figures.py normalization benchmarks/data/batch_norm_h200.jsonl.gz

print how many workspaces the figures give exactly: of the calls that they were fitted to, of whole families that were
left out of another fit, and of the calls in `--others FILE`. `--out FILE` writes the figures in the form of
`src/ullage/virtual/cudnn/data`. `--start FILE` names the kinds of networks and of buffers (by default the shipped
file). For another cuDNN or card, measure the calls there:

    python benchmarks/accuracy/operators.py measure-recurrent --count 3000 --seed 2 --out recurrent_h200.jsonl.gz
    python benchmarks/accuracy/operators.py measure-recurrent --count 12000 --seed 3 --rare --out rare_h200.jsonl.gz
    python benchmarks/training/cudnn_figures.py measure --count 2000 --seed 1 --out batch_norm_h200.jsonl.gz
"""

from __future__ import annotations

import argparse
import functools
import gzip
import itertools
import json
import math
import random
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "accuracy"), str(ROOT)]

import ullage  # noqa: E402
from ullage.units import ceil_div  # noqa: E402
from ullage.virtual.cudnn.plans import DATA_FOLDER, MEASURED_CUDNN  # noqa: E402
from ullage.virtual.operators import normalization, recurrent_kernels  # noqa: E402
from ullage.virtual.operators.recurrent_kernels import RecurrentNetwork, buffer_bytes  # noqa: E402

MARK = (1 << 30) + 1  # bytes of a request that nothing else makes
PASSES = ("forward", "backward")
Figures = dict[str, Any]


def rows_of(file: Path) -> Iterator[list[Any]]:
    with gzip.open(file, "rt") as lines:
        yield from map(json.loads, lines)


def exactness(flags: Iterable[bool]) -> str:
    several = list(flags)
    return f"{sum(several)} of {len(several)}" + (f" ({sum(several) / len(several):.1%})" if several else "")


# Recurrent networks: a workspace has the buffers of the forward or of the backward pass, whichever are larger.

MOST_TRIES, ENOUGH = 3000, 50  # draws of a few calls, and of draws that agree with most of them
FEW, PAIRED = 13, 8  # counts that may be joined to buffers of three sizes, and two values at once
LARGEST, SINGULAR = 64, 1e-9  # the largest count that is believed; the least determinant of calls that differ enough
BATCHES = [2**power for power in range(1, 6)]  # steps in a window


class RecurrentCall(NamedTuple):
    network: RecurrentNetwork
    backward: bool
    size: int


def recurrent_calls(file: Path) -> list[RecurrentCall]:
    """Return the workspaces of measured calls: what stands where the virtual GPU requests its own."""
    from tests.virtual import recurrent
    from tests.virtual.recording import recorded_events

    calls = list[RecurrentCall]()
    for values, real in rows_of(file):
        requests: dict[int, tuple[RecurrentNetwork, bool]] = {}

        def marked(network: RecurrentNetwork, backward: bool = False, requests: Any = requests) -> int:
            requests[MARK + backward] = network, backward
            return MARK + backward

        with ullage.virtual_gpu("H200") as gpu, mock.patch.object(RecurrentNetwork, "workspace", marked):
            gpu.libraries.need = lambda library: None  # type: ignore[method-assign]
            events = recurrent.run(recurrent.Call(*values), functools.partial(recorded_events, gpu))
        if [event < 0 for event in events] == [event < 0 for event in real]:
            taken = dict(zip(events, real, strict=True))  # weights and input have a workspace of the same size
            calls += [RecurrentCall(*requests[mark], taken[mark]) for mark in requests]
    return calls


class Fit:
    """Figures that are fitted to calls, one kind of network after another."""

    def __init__(self, start: Mapping[str, Any], calls: Sequence[RecurrentCall]) -> None:
        self.figures: Figures = json.loads(json.dumps(start))
        self.calls = list(calls)
        self._chance = random.Random()

    def fitted(self) -> Figures:
        """Return the figures that solve for counts, then for the window and the limits, then again for counts."""
        with mock.patch.object(recurrent_kernels, "_FIGURES", self.figures):
            before = None
            while before != (before := json.dumps([self.figures["window"], self.figures["small"]])):
                for row in self.figures["buffers"]:
                    self._fit_row(row)
                self._fit_window()
                self._fit_limits()
        return self.figures

    def _of(self, row: Mapping[str, Any]) -> list[RecurrentCall]:
        return [call for call in self.calls if call.network.row(call.backward) is row]

    def _fit_row(self, row: Figures) -> None:
        self._chance.seed(row["words"])  # the same figures however often it is fitted
        calls = self._of(row)
        values = [call.network.values() for call in calls]
        sizes = np.array([call.size - call.network.fixed() for call in calls])
        train = np.array([call.network.train for call in calls], dtype=bool)
        columns = {side: np.array([[each[name] for name in row[side]] for each in values]) for side in PASSES}
        best = self._phases(columns, sizes, train)
        if best is not None:
            for side, counts in zip(PASSES, best, strict=True):
                row[side] = {name: [1] * int(count) for name, count in zip(row[side], counts, strict=True)}
            _join(row, values, sizes, train)

    def _phases(self, columns: Mapping[str, Any], sizes: Any, train: Any) -> tuple[Any, Any] | None:
        """Return the counts of both passes that together explain most calls, and of those the smallest."""
        best, least = None, (0, 0)
        firsts = [self._counts(columns["forward"], sizes)]
        if (alone := self._counts(columns["forward"][~train], sizes[~train])) is not None:
            # In evaluation nothing is dropped: of what only training shows, a count of 0 or 1.
            firsts += [alone, alone + ~columns["forward"][~train].any(axis=0)]
        for first in [each for each in firsts if each is not None]:
            left = train & ~_explained(columns["forward"], first, sizes)
            seconds = [self._counts(columns["backward"][some], sizes[some]) for some in (left, train)]
            for second in [each for each in seconds if each is not None] or [columns["backward"][0] * 0]:
                unexplained = ~(train & _explained(columns["backward"], second, sizes))
                again = self._counts(columns["forward"][unexplained], sizes[unexplained])
                for pair in [(first, second), *([(again, second)] if again is not None else [])]:
                    score = self._score(pair, columns, sizes, train), -int(sum(map(sum, pair)))
                    if score > least:
                        best, least = pair, score
        return best

    def _score(self, pair: tuple[Any, Any], columns: Mapping[str, Any], sizes: Any, train: Any) -> int:
        forward, backward = (columns[side] @ counts for side, counts in zip(PASSES, pair, strict=True))
        total = np.where(train, np.maximum(forward, backward), forward)
        slack = int(self.figures["alignment"]) * max(map(sum, pair))
        return int(((total <= sizes) & (sizes <= total + slack)).sum())

    def _counts(self, columns: Any, sizes: Any) -> Any:
        """Return whole counts that explain most calls, solved from a few calls at a time.

        Buffers are aligned, so a size may be a little larger than the counts say.
        """
        used = list[int]()  # columns that are no sum of those before
        for column in range(columns.shape[1] if len(columns) else 0):
            if np.linalg.matrix_rank(columns[:, [*used, column]] / columns.max()) > len(used):
                used.append(column)
        best, most, tries = None, 0, 0
        while len(used) and len(sizes) > len(used) and tries * (most / len(sizes)) ** len(used) < ENOUGH:
            if (tries := tries + 1) > MOST_TRIES:
                break
            drawn = self._chance.sample(range(len(sizes)), len(used))
            few = columns[np.ix_(drawn, used)].astype(float)
            if not few.any(axis=0).all() or abs(np.linalg.det(few / few.max(axis=0))) < SINGULAR:
                continue
            solved = np.rint(np.linalg.solve(few, sizes[drawn].astype(float)))
            if solved.min() < 0 or solved.max() > LARGEST:
                continue
            counts = np.zeros(columns.shape[1], dtype=int)
            counts[used] = solved
            if (explained := int(_explained(columns, counts, sizes).sum())) > most:
                best, most = counts, explained
        return best

    def _exact(self, calls: Iterable[RecurrentCall]) -> int:
        return sum(call.network.workspace(call.backward) == call.size for call in calls)

    def _fit_window(self) -> None:
        """Solve for the steps of a window by batch: a part for the network and one for each layer."""
        windowed = [row for row in self.figures["buffers"] if "window" in row["backward"]]
        calls = [call for row in windowed for call in self._of(row) if call.network.deep]
        by_batch: dict[int, list[RecurrentCall]] = {}
        for call in calls:
            by_batch.setdefault(call.network.batch, []).append(call)
        pairs = [(first, each) for first in BATCHES for each in BATCHES]
        exact = {}
        for first, each in pairs:
            self.figures["window"][:] = [{"first": first, "each": each}]
            exact[first, each] = {batch: self._exact(several) for batch, several in by_batch.items()}
        # Dynamic programming over batches: the parts that explain most, a further part only if it explains two more.
        paths: dict[tuple[int, int], tuple[int, list[tuple[int, tuple[int, int]]]]] = {pair: (0, []) for pair in pairs}
        for batch in sorted(by_batch):
            best, way = max(paths.values(), key=lambda item: item[0])
            paths = {
                pair: (gain + exact[pair][batch], [*steps, (batch, pair)])
                for pair, (gain, steps) in (
                    (pair, max(old, (best - 2, way), key=lambda item: item[0])) for pair, old in paths.items()
                )
            }
        way = max(paths.values(), key=lambda item: item[0])[1]
        window = self.figures["window"]
        window.clear()
        for (batch, (first, each)), (later, after) in itertools.pairwise([*way, (0, (0, 0))]):
            if (first, each) != after:
                window.append({"batch": _roundest(batch, later), "first": first, "each": each})
        del window[-1]["batch"]

    def _fit_limits(self) -> None:
        """Solve for the most hidden units of a small network."""
        for side, place in itertools.product(PASSES, range(2)):
            plain = set(range(recurrent_kernels.TANH + 1)) if place else {recurrent_kernels.LSTM, recurrent_kernels.GRU}
            calls = [call for call in self.calls if call.backward == (side == PASSES[1]) and call.network.mode in plain]
            limits, exact = self.figures["small"][side], []
            for limits[place] in (0, sys.maxsize):
                exact.append([call.network.workspace(call.backward) == call.size for call in calls])
            both = [(call.network.hidden, *flags) for call, *flags in zip(calls, *exact, strict=True)]
            limits[place] = max(
                range(64, 1025, 64),
                key=lambda limit: sum(small if hidden <= limit else large for hidden, large, small in both),
            )


def _roundest(least: int, beyond: int) -> int:
    """Return the number from `least` on and below `beyond` that the largest power of two divides."""
    return max(range(least, max(beyond, least + 1)), key=lambda number: number & -number)


def _explained(columns: Any, counts: Any, sizes: Any) -> Any:
    left = sizes - columns @ counts
    return (left >= 0) & (left <= 32 * counts.sum())


def partitions(count: int, most: int | None = None) -> Iterator[list[int]]:
    """Yield the ways to add up to a count.

    >>> list(partitions(3))
    [[3], [2, 1], [1, 1, 1]]
    """
    if count == 0:
        yield []
    for part in range(min(count, most or count), 0, -1):
        yield from ([part, *rest] for rest in partitions(count - part, part))


@functools.cache
def _joined(count: int) -> list[list[int]]:
    """Return the buffers that counts may be joined to: of three sizes, or of two if there are many."""
    return [parts for parts in partitions(count) if len(set(parts)) <= (3 if count <= FEW else 2)]


def _join(row: Figures, values: Sequence[Mapping[str, int]], sizes: Any, train: Any) -> None:
    """Join counts of a value into buffers that are aligned as one, as long as that makes more calls exact."""

    @functools.cache
    def bytes_of(name: str, parts: tuple[int, ...]) -> Any:
        return np.array([buffer_bytes({name: parts}, each) for each in values])

    def exact() -> int:
        forward, backward = (
            sum((bytes_of(name, tuple(parts)) for name, parts in row[side].items()), np.zeros(len(values), dtype=int))
            for side in PASSES
        )
        return int((np.where(train, np.maximum(forward, backward), forward) == sizes).sum())

    matches: list[tuple[int, str]] = []
    moves = [(side, names) for side in PASSES for size in (1, 2) for names in itertools.combinations(row[side], size)]
    moves = [
        (side, names) for side, names in moves if len(names) == 1 or max(sum(row[side][n]) for n in names) <= PAIRED
    ]
    apart = {side: {name: sum(parts) for name, parts in row[side].items()} for side in PASSES}
    for joined in itertools.product((False, True), repeat=len(PASSES)):  # where the search begins
        for side, as_one in zip(PASSES, joined, strict=True):
            row[side] = {name: [count] * (count > 0) if as_one else [1] * count for name, count in apart[side].items()}
        best, before = exact(), -1
        while best > before:
            before = best
            for side, names in moves:
                own, store = row[side], [row[side][name] for name in names]
                for parts in itertools.product(*(_joined(sum(each)) for each in store)):
                    own |= dict(zip(names, parts, strict=True))
                    if (now := exact()) > best:
                        best, store = now, list(parts)
                own |= dict(zip(names, store, strict=True))
        matches.append((best, json.dumps([row[side] for side in PASSES])))
    row |= dict(zip(PASSES, json.loads(max(matches)[1]), strict=True))


def fit_recurrent(calls: Sequence[RecurrentCall], start: Mapping[str, Any]) -> Figures:
    return Fit(start, calls).fitted()


def exact_recurrent(call: RecurrentCall, figures: Mapping[str, Any]) -> bool:
    with mock.patch.object(recurrent_kernels, "_FIGURES", figures):
        return call.network.workspace(call.backward) == call.size


RECURRENT_FAMILIES = {
    "three layers": lambda call: call.network.layers == 3,
    "half precision": lambda call: call.network.dtype is torch.float16,
    "more inputs than hidden units": lambda call: call.network.inputs > call.network.hidden,
}

# Batch normalization: tiles of channels and rows, with some bytes a tile and a column of tiles.

WIDTHS, HEIGHTS = [2**power for power in range(2, 9)], range(32, 1025, 32)
SUMS, COUNTER = 8, 4  # bytes of two sums of a channel, and of the counter of a column


class NormCall(NamedTuple):
    size: list[int]
    dtype: torch.dtype
    forward: bool
    taken: int

    @property
    def rows(self) -> int:
        return math.prod(self.size) // self.size[1]


def norm_calls(file: Path) -> list[NormCall]:
    """Return the workspaces of measured calls: the fourth request, after the outputs."""
    calls = []
    for (size, dtype), *passes in rows_of(file):
        for forward, events in zip((True, False), passes, strict=True):
            requests = [event for event in events if event >= 0]
            if len(requests) == 4:  # a tensor of one place for each channel is contiguous: no workspace
                calls.append(NormCall(size, getattr(torch, dtype), forward, requests[3]))
    return calls


def _tiles(calls: Sequence[NormCall], width: int, height: int) -> tuple[int, list[int]]:
    """Return how many calls tiles of this size explain, and the bytes that are fixed, of a column and of a tile."""
    columns = np.array([ceil_div(call.size[1], width) for call in calls])
    tiles = columns * np.array([ceil_div(call.rows, height) for call in calls])
    terms = np.stack([np.ones_like(columns), columns, tiles], axis=1)
    taken = np.array([call.taken for call in calls])
    solved = np.rint(np.linalg.lstsq(terms.astype(float), taken.astype(float), rcond=None)[0]).astype(int)
    return int((terms @ solved == taken).sum()), solved.tolist()


def fit_normalization(calls: Sequence[NormCall], start: Mapping[str, Any]) -> Figures:
    """Return the figures: the tiles that explain most calls, and the bytes that they leave."""
    figures: Figures = json.loads(json.dumps(start))
    for forward, side in zip((True, False), PASSES, strict=True):
        for dtype, name in ((torch.float32, "rows"), (torch.float16, "rows_float16")):
            own = [call for call in calls if (call.forward, call.dtype) == (forward, dtype)]
            vectors = [call for call in own if call.size[1] % 4 == 0]
            explained = {(width, height): _tiles(vectors, width, height) for width in WIDTHS for height in HEIGHTS}
            width, height = max(explained, key=lambda tile: explained[tile][0])
            base, _, tile = explained[width, height][1]
            figures["width"], figures[side][name] = width, height
            figures[side] |= {"base": base, "count": tile - SUMS * width}
    for name, some in (
        ("odd_width", [call for call in calls if call.size[1] % 4 and call.size[1] > 4]),
        ("narrow_width", [call for call in calls if call.size[1] % 4 and call.size[1] < 4]),
    ):
        exact = {}
        for width in WIDTHS:
            figures[name] = width
            exact[width] = sum(exact_normalization(call, figures) for call in some)
        figures[name] = max(exact, key=lambda width: exact[width])
    return figures


def exact_normalization(call: NormCall, figures: Mapping[str, Any]) -> bool:
    with mock.patch.object(normalization, "_FIGURES", figures):
        return normalization.cudnn_workspace(call.size, call.dtype, call.forward) == call.taken


NORM_FAMILIES = {
    "more than 512 channels": lambda call: call.size[1] > 512,
    "more than 4,096 rows": lambda call: call.rows > 4096,
    "batches of more than 16": lambda call: call.size[0] > 16,
}


class Kind(NamedTuple):
    read: Callable[[Path], list[Any]]
    fit: Callable[[Any, Mapping[str, Any]], Figures]
    exact: Callable[[Any, Mapping[str, Any]], bool]
    families: Mapping[str, Callable[[Any], bool]]


KINDS = {
    "recurrent": Kind(recurrent_calls, fit_recurrent, exact_recurrent, RECURRENT_FAMILIES),
    "normalization": Kind(norm_calls, fit_normalization, exact_normalization, NORM_FAMILIES),
}


def shipped(kind: str) -> Path:
    return DATA_FOLDER / f"{kind}-cudnn{MEASURED_CUDNN}-sm_90.toml"


HEADS = {
    "recurrent": """
A workspace is a `header`, `library` bytes for each layer and direction, the lengths of padded sequences, a copy of the
weights, and the buffers of the forward or of the backward pass, whichever are larger. In evaluation there is no
backward pass. Each buffer is aligned. Its number says how often it holds a value: `token`, tokens times hidden units
and directions (`once` has one direction); `given`, tokens times inputs; `widest`, the larger of both; `state`, samples
times hidden units, directions and layers; `projected` and `projected_state`, the same as token and state of projected
units; `deep`, a token, two if there are several layers; `dropped`, one if there is dropout between them; `window`, one,
but of several layers at most samples times hidden units and directions for `first` steps and `each` more for a layer.

Words: lstm, gru or plain; padded or packed sequences; one or both directions; small or large; projected or whole. Up
to so many hidden units a network stays on the multiprocessors for all steps (`small`): with gates, and without.
""",
    "normalization": """
The tensor, channels last, is cut into tiles of `width` channels, or `odd_width` if their number is no multiple of 4,
and some `rows`. Fewer than 4 channels have tiles of `narrow_width` that are 4 times as high. Each tile leaves two
single-precision sums a channel and `count` bytes, each column of tiles a counter, and there are `base` bytes.
""",
}


def as_toml(what: str, figures: Mapping[str, Any], command: str) -> str:
    """Return figures as a file, below what they mean and the command that fitted them."""
    origin = f"Workspaces of cuDNN {figures['cudnn']} on an {figures['card']}. Another cuDNN or card has another file."
    head = [
        origin,
        "Written by",
        *textwrap.wrap(f"`{command}`.", 118, break_on_hyphens=False),
        *HEADS[what].splitlines(),
    ]
    lines = [f"# {line}".rstrip() for line in head]
    tables = {name: value for name, value in figures.items() if isinstance(value, dict)}
    rows = {name: value for name, value in figures.items() if isinstance(value, list) and "words" in value[0]}
    lines += ["", *_entries({name: value for name, value in figures.items() if name not in {**tables, **rows}})]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_entries(table)]
    for name, several in rows.items():
        for row in several:
            lines += ["", f"[[{name}]]", *_entries(row)]
    return "\n".join(lines) + "\n"


def _entries(table: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_value(value)}" for name, value in table.items()]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_value(each)}" for name, each in value.items()) + " }"
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, list) else json.dumps(value)


def report(kind: Kind, calls: Sequence[Any], others: Sequence[Any], start: Mapping[str, Any]) -> Figures:
    """Print how many workspaces the figures give exactly, and return those of all calls."""
    figures = kind.fit(calls, start)
    for name, some, those in (("start", calls, start), ("fitted", calls, figures), ("other calls", others, figures)):
        if some:
            print(f"{name}: {exactness(kind.exact(call, those) for call in some)}", flush=True)
    for name, held in kind.families.items():
        without = kind.fit([call for call in calls if not held(call)], start)
        fitted, left = ([kind.exact(call, without) for call in calls if held(call) is out] for out in (False, True))
        print(f"without {name}: {exactness(fitted)} fitted, {exactness(left)} left out", flush=True)
    return figures


def drawn_norms(count: int, seed: int) -> Iterator[tuple[list[int], str]]:
    """Yield sizes of channels-last tensors of few and many channels, round and odd, and types."""
    chance = random.Random(seed)
    for _ in range(count):
        unit = chance.choice([64, 8, 4, 1, 1])
        channels = unit * chance.randint(1, chance.choice([4, 2048]) // unit or 1)
        rows = int(2 ** chance.uniform(2, min(18, 27 - channels.bit_length())))
        batch = chance.randint(1, min(rows, 64))
        height = max(1, int((rows // batch) ** 0.5))
        width = max(1, rows // batch // height)
        yield [batch, channels, height, width], chance.choice(["float32", "float16"])


def measure(count: int, seed: int, out: Path) -> None:
    """Write a line for each batch normalization: size and type, and the requests of both passes on this GPU."""
    from operators import recorded

    cudnn = torch.ops.aten.cudnn_batch_norm, torch.ops.aten.cudnn_batch_norm_backward
    with gzip.open(out, "wt") as file:
        for size, dtype in drawn_norms(count, seed):
            source = torch.empty(size, dtype=getattr(torch, dtype), device="cuda", memory_format=torch.channels_last)
            grad = torch.empty_like(source.normal_()).normal_()
            weight, bias, mean, var = (torch.ones(size[1], device="cuda") for _ in range(4))
            for _ in range(2):  # a first time to load kernels
                with recorded() as forward:
                    made = cudnn[0](source, weight, bias, mean, var, True, 0.1, 1e-5)
                with recorded() as backward:
                    grads = cudnn[1](source, grad, weight, mean, var, made[1], made[2], 1e-5, made[3])
                del grads
            file.write(json.dumps([[size, dtype], forward, backward]) + "\n")


def main() -> None:
    """Fit, or measure the calls to fit to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in KINDS:
        fitting = commands.add_parser(name)
        fitting.add_argument("files", type=Path, nargs="+", help="measured calls")
        fitting.add_argument("--others", type=Path, nargs="+", default=[], help="calls to judge the figures by")
        fitting.add_argument("--start", type=Path, default=shipped(name), help="figures of the same form")
        fitting.add_argument("--cudnn", help="release that the calls were measured with")
        fitting.add_argument("--card", help="GPU that the calls were measured on")
        fitting.add_argument("--out", type=Path, help="file for the figures")
    measuring = commands.add_parser("measure")
    measuring.add_argument("--count", type=int, default=2000)
    measuring.add_argument("--seed", type=int, default=1)
    measuring.add_argument("--out", type=Path, default=Path("batch_norm_h200.jsonl.gz"))
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.count, given.seed, given.out)
        return
    kind, start = KINDS[given.command], tomllib.loads(given.start.read_text())
    start |= {name: value for name in ("cudnn", "card") if (value := getattr(given, name))}
    calls, others = ([call for file in files for call in kind.read(file)] for files in (given.files, given.others))
    figures = report(kind, calls, others, start)
    if given.out:
        command = " ".join(["python benchmarks/training/cudnn_figures.py", given.command, *map(str, given.files)])
        given.out.write_text(as_toml(given.command, figures, command))


if __name__ == "__main__":
    main()
