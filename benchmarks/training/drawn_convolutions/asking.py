"""Asks cuDNN for its first choice, with the knobs, about drawn problems: on a machine with the GPU."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from drawn_convolutions.answers import NO_ANSWER, NOT_ASKED, Piece, Plan, without_parts
from drawn_convolutions.drawing import CHUNK, draw, inputs_of, outputs, problems_of
from ullage.virtual.cudnn import backend, plans
from ullage.virtual.cudnn.formulas import ConvolutionProblem
from ullage.virtual.cudnn.network import DOUBT, read_network
from ullage.virtual.cudnn.workspaces import DATA_FOLDER, PLAN_NETWORK
from ullage_lab.train import workspaces as table

SURE = 0.85  # a share at which a plan is known
OTHERS = 0.05  # of the known ones that are asked all the same
MOST_KNOBS = 24
LIBRARY = "asking.so"
PIECE = 20  # chunks
CHECKED = 40  # problems that are asked in both ways first
Choice = tuple[int, tuple[tuple[int, int], ...], int]  # an engine, its knobs and its workspace


class Asker(backend.Cudnn):
    """The cuDNN of this process, asked for its first choice with the knobs."""

    def choice(self, problem: ConvolutionProblem, several: int = 1) -> Choice | None:
        """The engine, the knobs and the workspace of the first plan that PyTorch may take."""
        with ExitStack() as stack:
            graph = self._graph(problem, stack)
            heuristics = self._made(backend._HEURISTICS, stack)
            self._set(heuristics, 201, backend._DESCRIPTOR_TYPE, (ctypes.c_void_p * 1)(graph.value))
            self._set(heuristics, 200, backend._HEURISTIC_TYPE, (ctypes.c_int * 1)(backend.INSTANT))
            self._finalize(heuristics, "the heuristics")
            made = [self._made(backend._ENGINE_CONFIG, stack) for _ in range(several)]
            places = (ctypes.c_void_p * several)(*(one.value for one in made))
            count = self._get(heuristics, 202, backend._DESCRIPTOR_TYPE, places)
            for one in made[:count]:
                plan = self._candidate(one)
                if plan.allowed(problem.kind):
                    return plan.engine, self._knobs(one, stack), plan.workspace
        return self.choice(problem, 12) if several == count == 1 else None

    def _knobs(self, configuration: ctypes.c_void_p, stack: ExitStack) -> tuple[tuple[int, int], ...]:
        made = [self._made(7, stack) for _ in range(MOST_KNOBS)]
        places = (ctypes.c_void_p * MOST_KNOBS)(*(one.value for one in made))
        knobs = []
        for one in made[: self._get(configuration, 302, backend._DESCRIPTOR_TYPE, places)]:
            kind, value = (ctypes.c_int * 1)(), (ctypes.c_int64 * 1)()
            self._get(one, 600, 9, kind)
            self._get(one, 601, backend._INT64_TYPE, value)
            knobs.append((kind[0], value[0]))
        return tuple(knobs)


def network_file(folder: Path, direction: str) -> Path:
    """The network that was taught last: one in the folder of the answers, or else the shipped one."""
    taught = folder / f"packed-{direction}.npz"
    return taught if taught.exists() else DATA_FOLDER / PLAN_NETWORK


class Selection:
    """Which problems are worth a question: those whose plan the network of before does not know for sure, those whose
    plan says too little of the workspace, and a few of the others."""

    def __init__(self, folder: Path, direction: str) -> None:
        import torch

        network = read_network(network_file(folder, direction), direction)
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
        """Return the places of the rows to query."""
        torch = self._torch
        with torch.no_grad():
            given = torch.from_numpy(inputs_of(rows, self._direction)).to(self._device)
            hidden = (given - self._mean) * self._scale
            for number, (weights, bias) in enumerate(self._layers):
                added = torch.relu(hidden @ weights.T + bias)
                hidden = added if number == 0 else hidden + added
            scores = (hidden @ self._head[0].T + self._head[1]) / DOUBT
            shares, places = (each.cpu().numpy() for each in torch.softmax(scores, 1).max(1))
        alone = (rows[:, 2] == 1) | (rows[:, 3] == 1)
        wanted = (shares < SURE) | self._split[places] | (self._product[places] & alone)
        return np.flatnonzero(wanted | (r.random(len(rows)) < OTHERS))


class QuickAsker(Asker):
    """An asker that puts many questions without Python in between (`asking.c`)."""

    def __init__(self, library: Path) -> None:
        super().__init__()
        self._quick = ctypes.CDLL(str(library))
        names = "CreateDescriptor", "SetAttribute", "GetAttribute", "Finalize", "DestroyDescriptor"
        functions = [ctypes.cast(getattr(self._library, f"cudnnBackend{name}"), ctypes.c_void_p) for name in names]
        self._quick.begin(*functions, self._handle)

    def choices(self, direction: str, rows: Any) -> list[Choice | None]:
        """Return the result of `choice` for each row."""
        rows, ends = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(outputs(rows), np.int64)
        answers, results = np.zeros((len(rows), 3 + 2 * MOST_KNOBS), np.int64), np.empty(len(rows), np.int8)
        pointers = (ctypes.c_void_p(each.ctypes.data) for each in (rows, ends, answers, results))
        self._quick.ask(table.DIRECTIONS.index(direction), ctypes.c_int64(len(rows)), *pointers)
        choices: list[Choice | None] = []
        for result, (engine, size, count, *knobs) in zip(results.tolist(), answers.tolist(), strict=True):
            pairs = tuple(zip(knobs[: 2 * count : 2], knobs[1 : 2 * count : 2], strict=True))
            choices.append(None if result else (engine, pairs, size))
        return choices

    def slow_choices(self, direction: str, rows: Any) -> list[Choice | None]:
        """Return the same, one by one."""
        choices: list[Choice | None] = []
        for problem in problems_of(rows, direction):
            try:
                choices.append(self.choice(problem))
            except backend.CudnnError:
                choices.append(None)
        return choices


def _ask(number: int, workers: int, until: float, folder: Path, first: int, unsure: bool) -> None:
    """In a process of its own: pieces of several chunks of problems until the time is over, a file for each."""
    asker, seed = QuickAsker(folder / LIBRARY), first + number * PIECE
    selections = {direction: Selection(folder, direction) for direction in table.DIRECTIONS} if unsure else {}
    trial = draw(seed)[:CHECKED]
    same = all(asker.choices(each, trial) == asker.slow_choices(each, trial) for each in table.DIRECTIONS)
    put = asker.choices if same else asker.slow_choices
    if not same:
        print(f"process {number}: asking.c does not say what cuDNN says: it is asked one by one", flush=True)
    while time.time() < until:
        r, listed = np.random.default_rng(seed), dict[Plan, int]()
        rows = np.concatenate([draw(each) for each in range(seed, seed + PIECE)])
        plan, parts = np.full((3, len(rows)), NOT_ASKED, np.int16), np.zeros((3, len(rows)), np.int32)
        sizes = np.zeros((3, len(rows)), np.int64)
        for place, direction in enumerate(table.DIRECTIONS):
            chosen = selections[direction](rows, r) if unsure else np.arange(len(rows))
            for row, choice in zip(chosen.tolist(), put(direction, rows[chosen]), strict=True):
                if choice is None:
                    plan[place, row] = NO_ANSWER
                    continue
                cut, parts[place, row] = without_parts(choice[:2])
                plan[place, row], sizes[place, row] = listed.setdefault(cut, len(listed)), choice[2]
        seeds = np.repeat(np.arange(seed, seed + PIECE), CHUNK)
        Piece(seeds, rows.astype(np.int32), list(listed), plan, parts, sizes).write(folder / f"answers{seed}.npz")
        seed += workers * PIECE


def ask(folder: Path, seconds: float, workers: int, first: int, unsure: bool) -> None:
    """Query cuDNN in several processes for some seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / LIBRARY).exists():
        source = Path(__file__).with_name("asking.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", folder / LIBRARY, source], check=True)
    until, context = time.time() + seconds, multiprocessing.get_context("fork")
    os.environ["OMP_NUM_THREADS"] = "1"
    running = [
        context.Process(target=_ask, args=(number, workers, until, folder, first, unsure)) for number in range(workers)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join()
