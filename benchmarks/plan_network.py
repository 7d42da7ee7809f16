"""Teaches the network that guesses which plan cuDNN names for a convolution, and the trees that say what a plan takes.

    python benchmarks/plan_network.py ask FOLDER --seconds 215       # on the GPU: cuDNN's answers about drawn problems
    python benchmarks/plan_network.py ask FOLDER --seconds 300 --seed 8000000 --unsure
    python benchmarks/plan_network.py train FOLDER --seconds 250     # on the GPU: a network for each direction
    python benchmarks/plan_network.py fit FOLDER --out DATA          # what is shipped: ten minutes on two cores
    python benchmarks/cudnn_answers.py benchmarks/data/h200_fresh_answers.jsonl.xz
    python benchmarks/fresh_networks.py judge benchmarks/data/h200_fresh_second.jsonl.gz

Problems are drawn at random (`drawn_convolutions.py`). cuDNN's first choice is asked, with its knobs. With `--unsure`
only those are asked whose plan the shipped network does not know for sure, or whose plan says too little of the
workspace. One seed in fifty is held out of the training; what `train` prints is judged on those. The networks of
`fresh_networks.py` are in neither.

What is shipped was asked and trained on an H200 (PyTorch 2.11, cuDNN 9.19) on 2026-11-17: 2,525,000 problems of each
direction; 3.0, 2.4 and 4.2 million that a network taught by those was not sure of; and 65, 73 and 54 passes over all.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import io
import json
import lzma
import multiprocessing
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from drawn_convolutions import CHUNK, draw, inputs_of, problems_of
from ullage.research.cudnn_tables import table
from ullage.virtual.kernels.cudnn import candidates, plans
from ullage.virtual.kernels.cudnn.formulas import (
    TIMES_AN_OCTAVE,
    ConvolutionProblem,
    Formula,
    Terms,
    all_copies,
    needed_copies,
    terms,
)
from ullage.virtual.kernels.cudnn.workspaces import COPIED, DATA_FOLDER, PARTS, PLAN_NETWORK, PLAN_TREES

SEED = 7_000_000
SURE, OTHERS = (
    0.97,
    0.03,
)  # with `--unsure`: a share at which a plan is known, and how many of those are asked all the same
MOST_KNOBS = 24
UNSURE_SEED = 8_000_000  # from here on, only what the network of before was not sure of was asked
HELD_OUT = 50  # one seed in so many
WIDTH, LAYERS, DROPOUT, BATCH = 1024, 3, 0.3, 8192
SAMPLE = 20_000  # problems of an engine that its trees are grown on
LEAST_ASKED = 300  # an engine that was named less often has no trees
FORMULAS = 40  # of an engine
PRODUCT_CONSTANTS = 256, 272, 0, 16  # bytes of a product of matrices beside its partial sums
MOST_PARTS = 4096
SPLIT_SAMPLE = 400_000  # problems of an engine that the trees are grown on that split its sums
NEAR = 16_384  # bytes
PERSISTENT_SAMPLE = 150_000
DOUBTFUL = 20  # problems in a leaf of the tree that tells how sure the other one is


# Asking.


class Asker(candidates.Cudnn):
    """The cuDNN of this process, asked for its first choice with the knobs."""

    def choice(
        self, problem: ConvolutionProblem, several: int = 1
    ) -> tuple[int, tuple[tuple[int, int], ...], int] | None:
        """The engine, the knobs and the workspace of the first plan that PyTorch may take."""
        with ExitStack() as stack:
            graph = self._graph(problem, stack)
            heuristics = self._made(candidates._HEURISTICS, stack)
            self._set(heuristics, 201, candidates._DESCRIPTOR_TYPE, (ctypes.c_void_p * 1)(graph.value))
            self._set(heuristics, 200, candidates._HEURISTIC_TYPE, (ctypes.c_int * 1)(candidates.INSTANT))
            self._finalize(heuristics, "the heuristics")
            made = [self._made(candidates._ENGINE_CONFIG, stack) for _ in range(several)]
            places = (ctypes.c_void_p * several)(*(one.value for one in made))
            count = self._get(heuristics, 202, candidates._DESCRIPTOR_TYPE, places)
            for one in made[:count]:
                plan = self._candidate(one)
                if plan.allowed(problem.kind):
                    return plan.engine, self._knobs(one, stack), plan.workspace
        return self.choice(problem, 12) if several == count == 1 else None

    def _knobs(self, configuration: ctypes.c_void_p, stack: ExitStack) -> tuple[tuple[int, int], ...]:
        made = [self._made(7, stack) for _ in range(MOST_KNOBS)]
        places = (ctypes.c_void_p * MOST_KNOBS)(*(one.value for one in made))
        found = []
        for one in made[: self._get(configuration, 302, candidates._DESCRIPTOR_TYPE, places)]:
            kind, value = (ctypes.c_int * 1)(), (ctypes.c_int64 * 1)()
            self._get(one, 600, 9, kind)
            self._get(one, 601, candidates._INT64_TYPE, value)
            found.append((kind[0], value[0]))
        return tuple(found)


class Selection:
    """Which problems are worth a question: those whose plan the shipped network does not know for sure, those whose
    plan says too little of the workspace, and a few of the others."""

    def __init__(self, direction: str) -> None:
        import torch

        network = plans.network(DATA_FOLDER / PLAN_NETWORK, direction)
        assert network is not None
        self._torch, self._device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        self._mean, self._scale, self._layers, self._head = (
            self._on_device(each) for each in (network.mean, network.scale, network.layers, network.head)
        )
        engines = [plan.engine for plan in network.listed]
        self._split = np.isin(engines, plans.SPLIT[direction] + plans.SLICED[direction])
        self._product = np.isin(engines, plans.PRODUCT[direction])
        self._direction = direction

    def _on_device(self, arrays: Any) -> Any:
        if isinstance(arrays, np.ndarray):
            return self._torch.from_numpy(arrays.astype(np.float32)).to(self._device)
        return [self._on_device(each) for each in arrays]

    def __call__(self, rows: Any, r: Any) -> Any:
        """Places of the rows that are asked."""
        torch = self._torch
        with torch.no_grad():
            given = torch.from_numpy(inputs_of(rows, self._direction)).to(self._device)
            hidden = (given - self._mean) * self._scale
            for number, (weights, bias) in enumerate(self._layers):
                added = torch.relu(hidden @ weights.T + bias)
                hidden = added if number == 0 else hidden + added
            scores = (hidden @ self._head[0].T + self._head[1]) / plans.DOUBT
            shares, places = (each.cpu().numpy() for each in torch.softmax(scores, 1).max(1))
        alone = (rows[:, 2] == 1) | (rows[:, 3] == 1)
        wanted = (shares < SURE) | self._split[places] | (self._product[places] & alone)
        return np.flatnonzero(wanted | (r.random(len(rows)) < OTHERS))


def _ask(number: int, workers: int, until: float, folder: Path, first: int, unsure: bool) -> None:
    """In a process of its own: chunks of problems until the time is over."""
    asker, names, parts, chunks = Asker(), dict[Any, int](), [], []
    selections = {direction: Selection(direction) for direction in table.DIRECTIONS} if unsure else {}
    while time.time() < until:
        seed = first + number + len(chunks) * workers
        rows, r = draw(seed), np.random.default_rng(seed)
        part = np.full((3, CHUNK, 2), -1, np.int64)  # the number of the name, the workspace
        for place, direction in enumerate(table.DIRECTIONS):
            chosen = selections[direction](rows, r) if unsure else np.arange(CHUNK)
            for row, problem in zip(chosen.tolist(), problems_of(rows[chosen], direction), strict=True):
                try:
                    found = asker.choice(problem)
                except candidates.CudnnError:
                    continue
                if found is not None:
                    part[place, row] = names.setdefault(found[:2], len(names)), found[2]
        chunks.append(seed)
        parts.append(part)
    answers = np.concatenate(parts, 1)
    listed = np.frombuffer(json.dumps(list(names)).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, seeds=np.array(chunks), names=listed, name=answers[..., 0].astype(np.int16), size=answers[..., 1])
    (folder / f"answers{first}-{number}.npz.xz").write_bytes(lzma.compress(buffer.getvalue(), preset=1))


def ask(folder: Path, seconds: float, workers: int, first: int, unsure: bool) -> None:
    """Ask for so long; a file for each process."""
    folder.mkdir(parents=True, exist_ok=True)
    until, context = time.time() + seconds, multiprocessing.get_context("fork")
    running = [
        context.Process(target=_ask, args=(number, workers, until, folder, first, unsure)) for number in range(workers)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join()


def answers(folder: Path) -> tuple[Any, list[Any], Any, Any]:
    """Seeds, names, and of each direction the number of the name and the workspace."""
    names, seeds, numbers, sizes = dict[Any, int](), [], [], []
    for path in sorted(folder.glob("answers*.npz.xz")):
        with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as file:
            listed = [(engine, tuple(map(tuple, knobs))) for engine, knobs in json.loads(bytes(file["names"]))]
            places = np.array([*(names.setdefault(name, len(names)) for name in listed), -1])
            seeds.append(file["seeds"])
            numbers.append(places[file["name"]])
            sizes.append(file["size"])
    return np.concatenate(seeds), list(names), np.concatenate(numbers, 1), np.concatenate(sizes, 1)


def without_parts(name: Any) -> tuple[tuple[int, tuple[tuple[int, int], ...]], int]:
    """A name without the number of parts of a sum, and that number."""
    engine, knobs = name
    left, parts = dict(knobs), 0
    if plans.SPLIT_K in left:
        parts = left.pop(plans.SPLIT_K)
    if plans.SLICES in left:
        parts = left.pop(plans.SLICES)
        if plans.SPLIT_K_BUFFERS in left:
            left[plans.SPLIT_K_BUFFERS] = int(left[plans.SPLIT_K_BUFFERS] >= 0)
    return (engine, tuple(sorted(left.items()))), parts


class Labels:
    """The answers of a direction: the plans, the commonest first, and of each problem its plan, parts and workspace."""

    def __init__(self, folder: Path, direction: str) -> None:
        self.seeds, names, numbers, sizes = answers(folder)
        place = table.DIRECTIONS.index(direction)
        number, self.sizes = numbers[place], sizes[place]
        cut = [without_parts(name) for name in names]
        counts = np.bincount(number[number >= 0], minlength=len(names))
        seen: collections.Counter[Any] = collections.Counter()
        for (plan, _), count in zip(cut, counts.tolist(), strict=True):
            seen[plan] += count
        self.plans = [plan for plan, count in seen.most_common() if count]
        known = {plan: n for n, plan in enumerate(self.plans)}
        self.plan = np.array([*(known.get(plan, -1) for plan, _ in cut), -1])[number]
        self.parts = np.array([*(parts for _, parts in cut), 0])[number]


# Training.


def _inputs(task: tuple[int, Any, str]) -> Any:
    seed, asked, direction = task
    return inputs_of(draw(seed)[asked], direction)


def _train(direction: str, seconds: float, inputs: Any, labels: Labels, out: Path) -> None:
    """One network: residual layers with batch norms, which are folded into the weights when they are written. For the
    last third of the time it learns with weights rounded as they will be shipped."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mean, spread = inputs[:200_000].mean(0), inputs[:200_000].std(0) + 1e-3
    x = torch.from_numpy((inputs - mean) / spread).to(device)
    asked = labels.plan >= 0
    plan = torch.from_numpy(labels.plan[asked]).to(device)
    seeds = np.repeat(labels.seeds, CHUNK)[asked]
    held = seeds % HELD_OUT == 0
    learnt = torch.from_numpy(np.flatnonzero(~held)).to(device)

    class Net(nn.Module):
        """The network while it learns."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH if n else x.shape[1], WIDTH) for n in range(LAYERS + 1))
            self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(LAYERS + 1))
            self.head = nn.Linear(WIDTH, len(labels.plans))
            self.drop = nn.Dropout(DROPOUT)
            self.rounded = False

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            """Scores of plans."""
            with torch.autocast(device, enabled=False):  # lengths want more than 8 bits
                hidden = torch.relu(self.norms[0](self.layers[0](given)))
            for layer, norm in zip(self.layers[1:], self.norms[1:], strict=True):
                weight = self.in_few_bits(layer.weight) if self.rounded else layer.weight
                hidden = hidden + torch.relu(norm(nn.functional.linear(hidden, weight, layer.bias)))
            return self.head(self.drop(hidden))

        def in_few_bits(self, weight: torch.Tensor) -> torch.Tensor:
            """Weights as `_in_half_bytes` rounds them; gradients pass."""
            grouped = weight.detach().reshape(len(weight), -1, plans.GROUP)
            scale = grouped.abs().amax(2, keepdim=True) / 7 + 1e-12
            whole = ((grouped / scale).round().clamp(-8, 7) * scale).reshape(weight.shape)
            return weight + (whole - weight.detach())

    net, top = Net().to(device), 3e-3
    optimizer = torch.optim.AdamW(net.parameters(), lr=top, weight_decay=0.15, fused=device == "cuda")
    begin, step = time.time(), 0
    order, place = learnt, len(learnt)
    while (done := (time.time() - begin) / seconds) < 1:
        net.rounded = done > 2 / 3
        for group in optimizer.param_groups:
            group["lr"] = top * (min(1, done / 0.03) * (1 + np.cos(np.pi * done)) / 2 + 1e-4)
        if place + BATCH > len(order):
            order, place = learnt[torch.randperm(len(learnt), device=device)], 0
        chosen = order[place : place + BATCH]
        place, step = place + BATCH, step + 1
        with torch.autocast(device, torch.bfloat16):
            loss = nn.functional.cross_entropy(net(x[chosen]).float(), plan[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    net.eval()
    print(
        f"{direction}: {step * BATCH / len(learnt):.0f} passes over {len(learnt)}, loss {loss.item():.3f}", flush=True
    )
    for what, of in (("all drawn", seeds < UNSURE_SEED), ("unsure", seeds >= UNSURE_SEED)):
        tested = torch.from_numpy(np.flatnonzero(held & of)).to(device)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            right = sum(int((net(x[part]).argmax(1) == plan[part]).sum()) for part in tested.split(32768))
        print(
            f"{direction}: plan right {right / max(len(tested), 1):.2%} of {len(tested)} held out, {what}", flush=True
        )
    state = {name: value.detach().float().cpu().numpy() for name, value in net.state_dict().items()}
    arrays = {"mean": mean, "std": spread, "layers": np.array(LAYERS)}
    for n in range(LAYERS + 1):
        scale = state[f"norms.{n}.weight"] / np.sqrt(state[f"norms.{n}.running_var"] + 1e-5)
        bias = (state[f"layers.{n}.bias"] - state[f"norms.{n}.running_mean"]) * scale + state[f"norms.{n}.bias"]
        name = f"layer{n - 1}" if n else "first"
        arrays |= {name: state[f"layers.{n}.weight"] * scale[:, None], f"{name}_bias": bias}
    arrays |= {"head": state["head.weight"], "head_bias": state["head.bias"]}
    np.savez(out / f"network-{direction}.npz", **arrays)


def train(folder: Path, seconds: float, workers: int) -> None:
    """Train the three networks at once."""
    context, running = multiprocessing.get_context("fork"), []
    for direction in table.DIRECTIONS:
        labels = Labels(folder, direction)
        with context.Pool(workers) as pool:
            asked = (labels.plan >= 0).reshape(-1, CHUNK)
            tasks = [(int(seed), each, direction) for seed, each in zip(labels.seeds, asked, strict=True)]
            inputs = np.concatenate(pool.map(_inputs, tasks, chunksize=50))
        running.append(context.Process(target=_train, args=(direction, seconds, inputs, labels, folder)))
    for process in running:
        process.start()
    for process in running:
        process.join()


# What is shipped: the networks in few bits, and trees for each engine.


def _in_bytes(weights: Any) -> tuple[Any, Any]:
    scale = np.abs(weights).max(1) / 127 + 1e-12
    return np.round(weights / scale[:, None]).astype(np.int8), scale.astype(np.float32)


def _in_half_bytes(weights: Any) -> tuple[Any, Any]:
    grouped = weights.reshape(len(weights), -1, plans.GROUP)
    scale = (np.abs(grouped).max(2) / 7 + 1e-12).astype(np.float16)
    whole = np.clip(np.round(grouped / scale[:, :, None].astype(np.float32)), -8, 7).astype(np.int8) + 8
    whole = whole.reshape(weights.shape).astype(np.uint8)
    return whole[:, 0::2] | whole[:, 1::2] << 4, scale


def packed(trained: dict[str, Any], listed: list[Any], direction: str) -> dict[str, Any]:
    """A network as it is shipped."""
    found: dict[str, Any] = {name: trained[name] for name in ("layers", "mean", "std")}
    found["plans"] = np.frombuffer(json.dumps(listed).encode(), np.uint8)
    for name in ("first", "head"):
        found[name], found[f"{name}_scale"] = _in_bytes(trained[name].astype(np.float32))
        found[f"{name}_bias"] = trained[f"{name}_bias"].astype(np.float32)
    for n in range(int(trained["layers"])):
        found[f"layer{n}"], found[f"layer{n}_scale"] = _in_half_bytes(trained[f"layer{n}"].astype(np.float32))
        found[f"layer{n}_bias"] = trained[f"layer{n}_bias"].astype(np.float32)
    return {f"{direction}_{name}": value for name, value in found.items()}


def _whole(size: int, unit: int) -> int:
    """How many units a size has; 0 if not a whole number, or too many to be parts."""
    return size // unit if unit and size > 0 and size % unit == 0 and size // unit < MOST_PARTS else 0


def parts_taken(plan: plans.EnginePlan, cut: plans.Grid, size: int, copies: int, knob: int) -> int:
    """Into how many parts a sum is split: a knob, or, of persistent kernels, what the workspace tells."""
    if plan.engine in plans.PRODUCT[plan.direction]:
        return next((found for constant in PRODUCT_CONSTANTS if (found := _whole(size - constant, cut.tile_bytes))), 0)
    if plan.engine not in plans.PERSISTENT[plan.direction]:
        return plans.parts_by(plan, cut, knob)
    left = size - copies - 16
    if not cut.left or not cut.tile_bytes or left < CHUNK:
        return 0
    tiles = left // cut.tile_bytes
    return tiles // cut.left if tiles % cut.left == 0 and cut.left < tiles <= cut.clusters else 0


def in_copies(size: int, parts: Terms) -> Formula:
    """The stand-in for a workspace that no formula gives: copies of all tensors, times a power of the root of two."""
    octaves = round(2 * np.log2(max(size, 1) / all_copies(parts))) / 2
    times = round(TIMES_AN_OCTAVE * min(max(octaves, -6), 6))
    return Formula(0, 0, 0, 0, 0, 0, 0, 0, times or 1)


def grow_parts(direction: str, engine: int, rows: Any, labels: Labels) -> list[Any]:
    """Two trees that say into how many parts an engine splits its sums: one that knows every problem, and a coarse one
    for how sure that is."""
    classifier = __import__("sklearn.tree", fromlist=["tree"]).DecisionTreeClassifier
    plan_of = [plans.EnginePlan(direction, number, dict(knobs)) for number, knobs in labels.plans]
    places = np.flatnonzero(np.array([plan.engine == engine for plan in plan_of] + [False])[labels.plan])
    if engine in plans.PRODUCT[direction]:
        places = places[(rows[places, 2] == 1) | (rows[places, 3] == 1)]
    places = np.random.default_rng(2).permutation(places)[:SPLIT_SAMPLE]
    given = rows[places].astype(np.int64)
    if engine in plans.PERSISTENT[direction]:
        places, given = places[:PERSISTENT_SAMPLE], given[:PERSISTENT_SAMPLE]
        knobs = [labels.plans[number][1] for number in labels.plan[places]]
        told, parts = _persistent(direction, engine, given, knobs, labels.sizes[places].tolist())
    else:
        columns = plans.part_inputs(given.T, direction, engine in plans.PRODUCT[direction])
        knobs = np.array([plans.part_knobs(plan) for plan in plan_of])[labels.plan[places]]
        told, parts = np.concatenate([np.stack(columns, 1), knobs], 1), labels.parts[places]
        if engine in plans.PRODUCT[direction]:
            parts = _parts_of_products(direction, given, labels.sizes[places])
    told, tested = np.asarray(told, np.float32), len(places) // 50
    fine = classifier(random_state=0).fit(told[tested:], parts[tested:])
    right = (fine.predict(told[:tested]) == parts[:tested]).mean()
    coarse = classifier(min_samples_leaf=DOUBTFUL, random_state=0).fit(told[tested:], parts[tested:])
    leaves = fine.get_n_leaves()
    print(f"{direction} {engine}: {leaves} leaves name the parts of {right:.1%} of {tested} held out", flush=True)
    return [fine, coarse]


def _persistent(direction: str, engine: int, rows: Any, knobs: list[Any], sizes: list[int]) -> tuple[Any, Any]:
    """Of problems of a persistent kernel, what its trees are told and the parts they should name."""
    told, parts = [], []
    for problem, each, whole in zip(problems_of(rows, direction), knobs, sizes, strict=True):
        plan, size = plans.EnginePlan(direction, engine, dict(each)), plans.lengths(problem)
        cut = plans.grid(plan, size)
        count = parts_taken(plan, cut, whole, needed_copies(problem), 0)
        told.append(plans.tree_inputs(problem, plan, size, cut, 0))
        parts.append(plans.AS_MANY_AS_FIT if count == cut.most_parts > 1 else count)
    return np.array(told), np.array(parts)


def _parts_of_products(direction: str, rows: Any, sizes: Any) -> Any:
    """The parts that workspaces of products of matrices have room for."""
    inner, outer, samples = rows[:, 4], rows[:, 5], rows[:, 3] * rows[:, 7:10].prod(1)
    result = {"f": samples * outer, "d": samples * inner, "w": inner * outer}[direction] * 4
    found = np.zeros(len(rows), np.int64)
    for constant in reversed(PRODUCT_CONSTANTS):
        whole, rest = np.divmod(sizes - constant, result)
        found = np.where((rest == 0) & (whole > 0) & (whole < MOST_PARTS), whole, found)
    return found


def grow_engine(direction: str, engine: int, rows: Any, labels: Labels) -> dict[str, Any]:
    """The trees of an engine: how many parts (`p`), and which formula gives the rest (`c`)."""
    classifier = __import__("sklearn.tree", fromlist=["tree"]).DecisionTreeClassifier
    of_engine = np.array([plan[0] == engine for plan in labels.plans] + [False])
    places = np.flatnonzero(of_engine[labels.plan])
    places = np.random.default_rng(1).permutation(places)
    grouped = rows[places, 6] > 1  # copied in more ways than others: as many as there are, up to a half
    places = np.sort(np.concatenate([places[grouped][: SAMPLE // 2], places[~grouped][: SAMPLE // 2]]))
    problems, told, rests = problems_of(rows[places], direction), [], []
    for problem, place in zip(problems, places.tolist(), strict=True):
        plan = plans.EnginePlan(direction, engine, dict(labels.plans[labels.plan[place]][1]))
        size = plans.lengths(problem)
        cut = plans.grid(plan, size, problem.channels_last or size.batch == 1)
        whole = int(labels.sizes[place])
        parts = parts_taken(plan, cut, whole, needed_copies(problem), int(labels.parts[place]))
        told.append(plans.tree_inputs(problem, plan, size, cut, parts))
        rests.append(whole - plans.partial_bytes(plan, cut, parts))
    sizes = np.array(rests, dtype=np.int64)
    part = table.Measured(problems, np.maximum(sizes, 0), [terms(problem) for problem in problems])
    formulas = [formula for formula, _ in table.find_formulas(part)][:FORMULAS]
    columns, chosen = table.all_columns(part.parts), np.full(len(places), len(formulas))
    for number, formula in reversed(list(enumerate(formulas))):
        chosen[table.sizes_by(formula, columns) == part.sizes] = number
    exact = chosen < len(formulas)
    for number, formula in reversed(list(enumerate(formulas))):  # counters that are not known
        chosen[~exact & (np.abs(table.sizes_by(formula, columns) - part.sizes) <= NEAR)] = number
    exact_or_near = chosen < len(formulas)
    rest = [in_copies(int(size), each) for size, each in zip(sizes, part.parts, strict=True)]
    listed = formulas + sorted({formula for formula, known in zip(rest, exact_or_near, strict=True) if not known})
    number_of = {formula: number for number, formula in enumerate(listed)}
    chosen = np.where(exact_or_near, chosen, [number_of.get(formula, 0) for formula in rest])
    known = sizes >= 0
    tree = classifier(max_leaf_nodes=600, min_samples_leaf=2, random_state=0)
    found = {f"{direction}{engine}{COPIED}": ([tree.fit(np.array(told)[known], chosen[known])], listed)}
    right = (exact & known & (tree.predict(np.array(told)) == chosen)).mean()
    if any(engine in each[direction] for each in (plans.PERSISTENT, plans.SLICED, plans.SPLIT, plans.PRODUCT)):
        found[f"{direction}{engine}{PARTS}"] = grow_parts(direction, engine, rows, labels), []
    print(
        f"{direction} {engine}: {len(places)} problems; {len(formulas)} formulas explain {(exact & known).mean():.1%}, "
        f"{right:.1%} found, {(exact_or_near & known).mean():.1%} nearly",
        flush=True,
    )
    arrays: dict[str, Any] = {}
    for name, (grown, given) in found.items():
        exported = table.export(grown) | {"formulas": np.array(given, dtype=np.int64).reshape(-1, len(Formula._fields))}
        arrays |= {f"{name}_{key}": value for key, value in exported.items()}
    return arrays


def _fit(folder: Path, direction: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The network and the trees of a direction, as arrays."""
    labels = Labels(folder, direction)
    rows = np.concatenate([draw(int(seed)) for seed in labels.seeds])
    with np.load(folder / f"network-{direction}.npz") as file:
        network = packed(dict(file), labels.plans, direction)
    counts: collections.Counter[int] = collections.Counter()
    for plan, count in zip(labels.plans, np.bincount(labels.plan[labels.plan >= 0]).tolist(), strict=True):
        counts[plan[0]] += count
    trees: dict[str, Any] = {}
    for engine, count in counts.items():
        if count >= LEAST_ASKED:
            trees |= grow_engine(direction, engine, rows, labels)
    return network, trees


def fit(folder: Path, out: Path, workers: int) -> None:
    """Write the files that are shipped."""
    networks: dict[str, Any] = {}
    trees: dict[str, Any] = {}
    with multiprocessing.get_context("fork").Pool(min(workers, len(table.DIRECTIONS))) as pool:
        for network, grown in pool.starmap(_fit, [(folder, direction) for direction in table.DIRECTIONS]):
            networks |= network
            trees |= grown
    np.savez(out / PLAN_NETWORK, **networks)  # few bits do not compress
    np.savez_compressed(out / PLAN_TREES, **trees)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ask", "train", "fit"))
    parser.add_argument("folder", type=Path, help="of the answers and the networks")
    parser.add_argument("--seconds", type=float, default=200, metavar="N", help="how long to ask or to train (200)")
    parser.add_argument("--workers", type=int, default=16, metavar="N", help="processes (16)")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help=f"where to begin with asking ({SEED})")
    parser.add_argument("--unsure", action="store_true", help="ask only where the shipped network is not sure")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DATA", help="folder for what is shipped")
    options = parser.parse_args()
    if options.what == "ask":
        ask(options.folder, options.seconds, options.workers, options.seed, options.unsure)
    elif options.what == "train":
        train(options.folder, options.seconds, options.workers)
    else:
        fit(options.folder, options.out, options.workers)


if __name__ == "__main__":
    main()
