"""Teaches the network that guesses which plan cuDNN names for a convolution, and the trees that say what a plan takes.

    python benchmarks/plan_network.py ask FOLDER --seconds 215       # on the GPU: cuDNN's answers about drawn problems
    python benchmarks/plan_network.py ask FOLDER --seconds 300 --seed 8000000 --unsure
    python benchmarks/plan_network.py ask FOLDER --seconds 195 --seed 9000000 --unsure
    python benchmarks/plan_network.py train FOLDER --seconds 250     # on the GPU: a network for each direction
    python benchmarks/plan_network.py fit FOLDER --out DATA          # what is shipped: ten minutes on two cores
    python benchmarks/cudnn_answers.py benchmarks/data/h200_fresh_answers.jsonl.xz
    python benchmarks/fresh_networks.py judge benchmarks/data/h200_fresh_second.jsonl.gz

Problems are drawn at random (`drawn_convolutions/`). cuDNN's first choice is asked, with its knobs. With `--unsure`
only those are asked whose plan the shipped network does not know for sure, or whose plan says too little of the
workspace. One seed in fifty is held out of the training; what `train` prints is judged on those. The networks of
`fresh_networks.py` are in neither.

What is shipped was asked and trained on an H200 (PyTorch 2.11, cuDNN 9.19) on 2026-11-17: 2,525,000 problems of each
direction; 3.0, 2.4 and 4.2 million that a network taught by those was not sure of; and 65, 73 and 54 passes over all.
The trees were grown on 8 million further answers, too (`--seed 9000000`), which the network has not learnt; not all of
them at once, so that `fit` would give slightly different ones.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np

from drawn_convolutions.answers import UNSURE_SEED, Labels, unanswered
from drawn_convolutions.asking import ask
from drawn_convolutions.drawing import inputs_of
from ullage.research.cudnn_tables import table
from ullage.virtual.kernels.cudnn.network import GROUP
from ullage.virtual.kernels.cudnn.workspaces import PLAN_NETWORK, PLAN_TREES

SEED = 7_000_000
HELD_OUT = 50  # one seed in so many
WIDTH, LAYERS, DROPOUT, BATCH = 1024, 3, 0.3, 8192
PART = 20_000  # rows whose inputs a process makes at once
LEAST_ASKED = 300  # an engine that was named less often has no trees


# Training.


_labels: list[Labels] = []  # of the direction at hand, for processes that are forked


def _inputs(task: tuple[slice, str]) -> Any:
    part, direction = task
    return inputs_of(_labels[0].rows[part].astype(np.int64), direction)


def _train(direction: str, seconds: float, inputs: Any, labels: Labels, out: Path) -> None:
    """One network: residual layers with batch norms, which are folded into the weights when they are written. For the
    last third of the time it learns with weights rounded as they will be shipped."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mean, spread = inputs[:200_000].mean(0), inputs[:200_000].std(0) + 1e-3
    x = torch.from_numpy((inputs - mean) / spread).to(device)
    plan = torch.from_numpy(labels.plan).to(device)
    seeds = labels.seeds
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
            grouped = weight.detach().reshape(len(weight), -1, GROUP)
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
        labels = Labels(folder, direction, workers)
        _labels[:] = [labels]
        parts = [slice(begin, begin + PART) for begin in range(0, len(labels.rows), PART)]
        with context.Pool(workers) as pool:
            inputs = np.concatenate(pool.map(_inputs, [(part, direction) for part in parts]))
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
    grouped = weights.reshape(len(weights), -1, GROUP)
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


def _grown(task: tuple[str, int]) -> dict[str, Any]:
    direction, engine = task
    from drawn_convolutions.trees import grow_engine  # needs scikit-learn

    return grow_engine(direction, engine, _labels[0])


def fit(folder: Path, out: Path, workers: int) -> None:
    """Write the files that are shipped."""
    from drawn_convolutions.trees import grow_no_plan

    networks: dict[str, Any] = {}
    trees: dict[str, Any] = {}
    for direction in table.DIRECTIONS:
        labels = Labels(folder, direction, workers)
        with np.load(folder / f"network-{direction}.npz") as file:
            networks |= packed(dict(file), labels.plans, direction)
        engines = np.array([engine for engine, _ in labels.plans])[labels.plan]
        common = [engine for engine, count in enumerate(np.bincount(engines).tolist()) if count >= LEAST_ASKED]
        trees |= grow_no_plan(direction, *unanswered(folder, direction, workers))
        _labels[:] = [labels]
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            for grown in pool.imap(_grown, [(direction, engine) for engine in common]):
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
