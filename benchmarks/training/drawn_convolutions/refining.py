"""Finds again what rounding took from the first layer of a network that is shipped in few bits.

Each weight lies within half a step of its rounded value. There it is moved so that the network names the plans of
answers that it has not seen. All other layers stay as they are. It needs minutes on two cores.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from drawn_convolutions.answers import NOT_ASKED, as_plan, pieces, read_piece
from drawn_convolutions.drawing import inputs_of
from ullage.virtual.cudnn.network import PlanNetwork
from ullage_lab.train import workspaces as table

RATE, BATCH = 0.03, 2048  # steps of a weight at most in an update, and problems
REACH = 0.55  # steps to either side
SURE, REPEATED = 0.97, 0.03  # a share at which a plan is known, and how many of the known ones are learnt all the same
SOFTENED = 1.3  # scores are divided by it while the network learns


def refined(values: dict[str, Any], direction: str, folder: Path, held_out: int, seconds: float) -> dict[str, Any]:
    """The arrays of a direction's network, with a first layer in 16 bits."""
    import torch

    network, place = PlanNetwork(values, np, direction), table.DIRECTIONS.index(direction)
    number = {as_plan(*each): n for n, each in enumerate(json.loads(bytes(values["plans"])))}
    (first, bias), *rest = [tuple(map(torch.from_numpy, layer)) for layer in network.layers]
    head, head_bias = map(torch.from_numpy, network.head)
    step = torch.from_numpy(values["first_scale"])
    moved, moved_bias = (torch.zeros_like(each, requires_grad=True) for each in (first, bias))

    def scores(given: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(given @ (first + moved * step[:, None]).T + bias + moved_bias * step)
        for weights, each in rest:
            hidden = hidden + torch.relu(hidden @ weights.T + each)
        return hidden @ head.T + head_bias

    def problems(path: Path, held: bool) -> tuple[torch.Tensor, torch.Tensor]:
        piece = read_piece(path)
        known = np.array([*(number.get(plan, NOT_ASKED) for plan in piece.plans), NOT_ASKED, NOT_ASKED])
        plan = known[piece.plan[place]]
        rows = (plan != NOT_ASKED) & ((piece.seeds % held_out == 0) == held)
        inputs = (inputs_of(piece.rows[rows].astype(np.int64), direction) - network.mean) * network.scale
        return torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(plan[rows])

    def right() -> str:
        hits = [(scores(x).argmax(1) == y).numpy() for x, y in (problems(path, True) for path in pieces(folder))]
        return f"plan right {np.concatenate(hits).mean():.2%} of {sum(map(len, hits))} held out"

    with torch.no_grad():
        print(f"{direction} before: {right()}", flush=True)
    optimizer, begin, learnt = torch.optim.Adam([moved, moved_bias], betas=(0.9, 0.98)), time.time(), 0
    for path in pieces(folder):
        if (done := (time.time() - begin) / seconds) >= 1:
            break
        for x, y in zip(*(each.split(BATCH) for each in problems(path, False)), strict=True):
            with torch.no_grad():
                share, best = torch.softmax(scores(x) / SOFTENED, 1).max(1)
                hard = torch.nonzero((share < SURE) | (best != y) | (torch.rand(len(y)) < REPEATED))[:, 0]
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1, 0.05 + learnt / BATCH / 20) * (1 + np.cos(np.pi * done)) / 2
            loss = torch.nn.functional.cross_entropy(scores(x[hard]) / SOFTENED, y[hard], reduction="sum") / len(y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with torch.no_grad():
                moved.clamp_(-REACH, REACH)
            learnt += len(y)
    with torch.no_grad():
        print(f"{direction} after {learnt}: {right()}", flush=True)
        weights, biases = (first + moved * step[:, None]).numpy(), (bias + moved_bias * step).numpy()
    whole, scale = in_whole_numbers(weights, np.int16)
    return values | {"first": whole, "first_scale": scale, "first_bias": biases}


def in_whole_numbers(weights: Any, kind: Any) -> tuple[Any, Any]:
    """Weights in 8 or 16 bits, with a scale for each row."""
    scale = np.abs(weights).max(1) / np.iinfo(kind).max + 1e-12
    return np.round(weights / scale[:, None]).astype(kind), scale.astype(np.float32)
