"""Asks cuDNN for its first choice, with the knobs, about drawn problems: on a machine with the GPU."""

from __future__ import annotations

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

from drawn_convolutions.drawing import CHUNK, draw, inputs_of, problems_of
from ullage.research.cudnn_tables import table
from ullage.virtual.kernels.cudnn import candidates, plans
from ullage.virtual.kernels.cudnn.formulas import ConvolutionProblem
from ullage.virtual.kernels.cudnn.network import DOUBT, read_network
from ullage.virtual.kernels.cudnn.workspaces import DATA_FOLDER, PLAN_NETWORK

SURE = 0.85  # a share at which a plan is known
OTHERS = 0.03  # of the known ones that are asked all the same
MOST_KNOBS = 24


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

        network = read_network(DATA_FOLDER / PLAN_NETWORK, direction)
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
            scores = (hidden @ self._head[0].T + self._head[1]) / DOUBT
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
