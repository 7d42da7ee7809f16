"""Teaches the network that guesses which plan cuDNN names for a convolution, and the trees that say what a plan takes.

    python benchmarks/training/plan_network.py ask FOLDER --seconds 160 # on the GPU: cuDNN's answers about problems
    python benchmarks/training/plan_network.py ask FOLDER --seconds 250 --seed 9500000 --unsure
    python benchmarks/training/plan_network.py train FOLDER --seconds 300 # on the GPU: a network for each direction
    python benchmarks/training/plan_network.py refine FOLDER --seconds 190 # a first layer in 16 bits for each
    python benchmarks/training/plan_network.py fit FOLDER --out DATA # what is shipped: ten minutes on two cores
    python benchmarks/training/cudnn_answers.py benchmarks/data/h200_fresh_answers.jsonl.xz
    python benchmarks/accuracy/fresh_networks.py benchmarks/data/h200_fresh_second.jsonl.gz

Problems are drawn at random (`drawn_convolutions/`). cuDNN's first choice is asked, with its knobs: about 145,000 times
a second on 13 cores (`asking.c`). With `--unsure` only those are asked whose plan the network of before does not know
for sure, or whose plan says too little of the workspace. `train` goes on from that network, and may run beside `ask`:
it learns from files as they come. One seed in fifty is held out; what is printed is judged on those. The networks of
`fresh_networks.py` are in neither.

What is shipped was asked and trained on an H200 (PyTorch 2.11, cuDNN 9.19). On 2026-11-17: 2,525,000 problems of each
direction, 3.0, 2.4 and 4.2 million that a network taught by those was not sure of, and 65, 73 and 54 passes over all.
On 2026-11-18: 1.7 million problems of each direction (`--seconds 40 --seed 10000000`), of which half are like layers of
networks, then 19.6 million of which those were asked that the network was not sure of (`--seconds 250 --seed 20000000
--unsure`), beside 560 seconds of `train`: 7.4, 5.5 and 9.7 million answers were learnt. The trees were grown on these
answers; those of engines 62, 67 and 70 forward, 40, 56, 57, 58 and 74 of the data gradient and 16, 17, 39 and 40 of the
filter gradient once more, on the 1.7 million, after formulas were found for them.

Its weights were rounded once more after the norms were folded in: as packed it named 0.8, 0.4 and 0.5 points fewer
plans than when it had learnt. Since then weights are packed as they were rounded while learning. Later on 2026-11-18:

- A million problems of each direction (`--seconds 25 --seed 11000000`), then 19.6 million, of which those were asked
  that the network was not sure of (`--seconds 225 --seed 40000000 --unsure`): 7.4, 5.6 and 10.1 million answers. The
  trees were grown on these, but for those that say how sure a number of parts is: these are the ones of before. 520
  seconds of `train` beside that, at the usual rate, made the networks worse, and they are not
  shipped: 94.8, 95.7 and 94.6% of 21,000 plans that were held out, instead of 95.4, 96.7 and 96.3%.
- 1.4 million problems of each direction (`--seconds 28 --seed 12000000`) beside 112 seconds of `train --rate 0.0003`:
  95.9, 96.7 and 96.2% of 28,000 instead of 95.2, 96.7 and 96.3%. Of these the forward network is shipped.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np

from drawn_convolutions.answers import (
    NO_ANSWER,
    NO_PLAN,
    NOT_ASKED,
    UNSURE_SEED,
    Labels,
    as_plan,
    pieces,
    read_piece,
)
from drawn_convolutions.asking import ask, network_file
from drawn_convolutions.refining import in_whole_numbers, refined
from ullage.virtual.cudnn.arrays import write_arrays
from ullage.virtual.cudnn.formulas import Lengths
from ullage.virtual.cudnn.network import DOUBT, GROUP, network_inputs, read_network
from ullage.virtual.cudnn.workspaces import PLAN_NETWORK, PLAN_TREES
from ullage_lab.train import workspaces as table

SEED = 7_000_000
HELD_OUT = 50  # one seed in so many
LAYERS = {"f": 3, "d": 3, "w": 4}  # that are hidden and residual
WIDTH, DROPOUT, BATCH = 1024, 0.3, 16384
NEW_LAYER, NEW_PLAN = 0.1, -8.0  # the scale of a new layer, and the score of a new plan
MOST_NEW = 96  # plans
NOT_LEARNT = -100  # in place of a plan: what `cross_entropy` leaves out
LEAST_LEARNT = 300_000  # answers to begin with
LOOK_EVERY, LAST_LOOK = 4.0, 0.85  # seconds, and the share of the time after which no new answers are learnt
REPORT = 5000  # steps
SURE, REPEATED = 0.9, 0.25  # a share at which a plan is known, and how many of the known ones are learnt again
LEAST_ASKED = 300  # an engine that was named less often has no trees


# Training.


_labels: list[Labels] = []  # of the direction at hand, for processes that are forked


class Learnt:
    """The answers of a direction on the device, as they come: inputs of the network, plans, seeds."""

    def __init__(self, folder: Path, direction: str, known: list[Any], mean: Any, spread: Any) -> None:
        import torch

        self.most = len(known) + MOST_NEW  # plans; what is not among these is not learnt

        self.torch, self.device = torch, "cuda" if torch.cuda.is_available() else "cpu"
        self._folder, self._direction, self._read = folder, direction, set[str]()
        self.plans = {plan: number for number, plan in enumerate(known)}
        self._mean, self._scale = (torch.from_numpy(each).to(self.device) for each in (mean, 1 / spread))
        self.count, self.room = 0, 1 << 20
        self.worth: Any = None  # which problems are learnt, by inputs and plans; those that are held out are kept
        self.x = torch.empty(self.room, len(mean), device=self.device)
        self.plan = torch.empty(self.room, dtype=torch.int64, device=self.device)
        self.seeds = torch.empty(self.room, dtype=torch.int64, device=self.device)

    def inputs(self, rows: Any) -> Any:
        """`network_inputs` of many rows at once."""
        torch = self.torch
        columns = network_inputs(
            Lengths(list(rows.to(self.device).long().T)),
            self._direction,
            lambda values: torch.log2(torch.clamp(values.double(), min=1)),
            lambda values, most: torch.clamp(values, max=most),
        )
        return (torch.stack([column.float() for column in columns], 1) - self._mean) * self._scale

    def read(self) -> int:
        """Add what is in new files; how many those are."""
        torch, place = self.torch, table.DIRECTIONS.index(self._direction)
        fresh = [path for path in pieces(self._folder) if path.name not in self._read]
        for path in fresh:
            self._read.add(path.name)
            piece = read_piece(path)
            cut = [*piece.plans, NO_PLAN]  # the last one, -1, is of no answer
            known = np.flatnonzero(piece.plan[place] != NOT_ASKED)
            named = np.where(piece.plan[place][known] == NO_ANSWER, -1, piece.plan[place][known])
            names, back = np.unique(named, return_inverse=True)
            places = np.array([self._place(cut[each]) for each in names])
            self._add(piece.rows[known], places[back], piece.seeds[known])
        if fresh and self.device == "cuda":
            torch.cuda.synchronize()
        return len(fresh)

    def _place(self, plan: Any) -> int:
        if plan not in self.plans and len(self.plans) < self.most:
            self.plans[plan] = len(self.plans)
        return self.plans.get(plan, NOT_LEARNT)

    def _add(self, rows: Any, plan: Any, seeds: Any) -> None:
        torch = self.torch
        x, number = self.inputs(torch.from_numpy(rows)), torch.from_numpy(plan).to(self.device)
        if self.worth is not None:
            index = torch.nonzero(self.worth(x, number) | torch.from_numpy(seeds % HELD_OUT == 0).to(self.device))[:, 0]
            x, number, seeds = x[index], number[index], seeds[index.cpu().numpy()]
        end = self.count + len(x)
        while end > self.room:
            self.x, self.plan, self.seeds = (
                torch.cat([each, torch.empty_like(each)]) for each in (self.x, self.plan, self.seeds)
            )
            self.room *= 2
        part = slice(self.count, end)
        self.x[part], self.plan[part], self.seeds[part] = x, number, torch.from_numpy(seeds)
        self.count = end


def known(folder: Path, direction: str) -> dict[str, Any]:
    """The network of a direction to begin with, in single precision, and its plans."""
    path = network_file(folder, direction)
    network = read_network(path, direction)
    assert network is not None
    (first, first_bias), *rest = network.layers
    arrays = {"mean": network.mean, "std": 1 / network.scale, "first": first, "first_bias": first_bias}
    for number, (weights, bias) in enumerate(rest):
        arrays |= {f"layer{number}": weights, f"layer{number}_bias": bias}
    arrays |= {"head": network.head[0], "head_bias": network.head[1], "layers": len(rest)}
    with np.load(path) as file:
        listed = json.loads(bytes(file[f"{direction}_plans"]))
    return arrays | {"plans": [as_plan(*each) for each in listed]}


def _train(direction: str, seconds: float, folder: Path, top: float) -> None:
    """One network: residual layers with batch norms, which are folded into the weights when they are written. It
    begins with a known one, and learns from answers as they come. For the last third of the time it learns with
    weights rounded as they will be shipped."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    begin, old = time.time(), known(folder, direction)
    learnt = Learnt(folder, direction, old["plans"], old["mean"], old["std"])
    device, layers = learnt.device, LAYERS[direction]
    while learnt.count < LEAST_LEARNT and time.time() < begin + seconds / 2:
        learnt.read()
        time.sleep(0.5)

    class Net(nn.Module):
        """The network while it learns."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH if n else len(old["mean"]), WIDTH) for n in range(layers + 1))
            self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(layers + 1))
            self.head = nn.Linear(WIDTH, learnt.most)
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

        @torch.no_grad()
        def begin_with(self, given: torch.Tensor) -> None:
            """The weights of the known network; norms that change nothing about it on such inputs."""
            hidden = given
            for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
                name = f"layer{number - 1}" if number else "first"
                if name not in old:  # a new layer, which adds little at first
                    norm.weight.fill_(NEW_LAYER)
                    continue
                layer.weight.copy_(torch.from_numpy(old[name]))
                layer.bias.copy_(torch.from_numpy(old[f"{name}_bias"]))
                before = layer(hidden)
                norm.running_mean.copy_(before.mean(0))
                norm.running_var.copy_(before.var(0))
                norm.weight.copy_((norm.running_var + norm.eps).sqrt())
                norm.bias.copy_(norm.running_mean)
                hidden = torch.relu(before) if number == 0 else hidden + torch.relu(before)
            self.head.weight.zero_()
            self.head.bias.fill_(NEW_PLAN)
            self.head.weight[: len(old["head"])] = torch.from_numpy(old["head"])
            self.head.bias[: len(old["head"])] = torch.from_numpy(old["head_bias"])

    net = Net().to(device)
    net.begin_with(learnt.x[: min(learnt.count, 200_000)])

    def judged(when: str, net: Net) -> None:
        """Print how many plans of what is held out are right."""
        net.eval()
        seeds = learnt.seeds[: learnt.count]
        held = seeds % HELD_OUT == 0
        for what, of in (("all drawn", seeds < UNSURE_SEED), ("unsure", seeds >= UNSURE_SEED)):
            tested = torch.nonzero(held & of)[:, 0]
            with torch.no_grad(), torch.autocast(device, torch.bfloat16):
                right = sum(
                    int((net(learnt.x[part]).argmax(1) == learnt.plan[part]).sum()) for part in tested.split(32768)
                )
            share = right / max(len(tested), 1)
            print(f"{direction} {when}: plan right {share:.2%} of {len(tested)} held out, {what}", flush=True)

    optimizer = torch.optim.AdamW(net.parameters(), lr=top, weight_decay=0.15, fused=device == "cuda")
    settled = copy.deepcopy(net).eval()

    def worth(x: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
        """What the network of before did not know for sure, and some of the rest."""
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            share, best = torch.softmax(settled(x).float() / DOUBT, 1).max(1)
        return (share < SURE) | (best != plan) | (torch.rand(len(x), device=device) < REPEATED)

    learnt.worth = worth
    order, place, step, looked, loss = torch.empty(0), 0, 0, 0.0, torch.zeros(())
    while (done := (time.time() - begin) / seconds) < 1:
        net.rounded = done > 2 / 3
        for group in optimizer.param_groups:
            group["lr"] = top * (min(1, done / 0.05) * (1 + np.cos(np.pi * done)) / 2 + 1e-4)
        if time.time() - looked > LOOK_EVERY and done < LAST_LOOK:
            fresh, looked = learnt.read(), time.time()
            order = order[:0] if fresh else order
        if place + BATCH > len(order):
            training = torch.nonzero(learnt.seeds[: learnt.count] % HELD_OUT)[:, 0]
            order, place = training[torch.randperm(len(training), device=device)], 0
        chosen = order[place : place + BATCH]
        place, step = place + BATCH, step + 1
        with torch.autocast(device, torch.bfloat16):
            loss = nn.functional.cross_entropy(net(learnt.x[chosen]).float(), learnt.plan[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % REPORT == 0:
            print(f"{direction}: {done:.0%}, {step} steps, {learnt.count} answers, loss {loss.item():.3f}", flush=True)
    print(f"{direction}: {step * BATCH} of {learnt.count} answers, loss {loss.item():.3f}", flush=True)
    judged("before", settled)
    judged("taught", net)
    listed = list(learnt.plans)
    state = {name: value.detach().float().cpu().numpy() for name, value in net.state_dict().items()}
    arrays = {"mean": old["mean"], "std": old["std"], "layers": np.array(layers)}
    for n in range(layers + 1):
        scale = state[f"norms.{n}.weight"] / np.sqrt(state[f"norms.{n}.running_var"] + 1e-5)
        bias = (state[f"layers.{n}.bias"] - state[f"norms.{n}.running_mean"]) * scale + state[f"norms.{n}.bias"]
        name = f"layer{n - 1}" if n else "first"
        weights = state[f"layers.{n}.weight"]
        arrays |= {name: weights, f"{name}_factor": scale} if n else {name: weights * scale[:, None]}
        arrays[f"{name}_bias"] = bias
    arrays |= {"head": state["head.weight"][: len(listed)], "head_bias": state["head.bias"][: len(listed)]}
    np.savez(folder / f"packed-{direction}.npz", **packed(arrays, listed, direction))


def train(folder: Path, seconds: float, top: float) -> None:
    """Train the three networks at once, beside a process that asks or after it."""
    running = [
        multiprocessing.get_context("spawn").Process(target=_train, args=(direction, seconds, folder, top))
        for direction in table.DIRECTIONS
    ]
    for process in running:
        process.start()
    for process in running:
        process.join()


# What is shipped: the networks in few bits, and trees for each engine.


def _in_half_bytes(weights: Any, factor: Any) -> tuple[Any, Any]:
    """Weights in 4 bits, rounded as the network learnt with them: before a norm's factor for each row is folded in.
    Rounded after it, some would go the other way."""
    grouped = weights.reshape(len(weights), -1, GROUP)
    scale = np.abs(grouped).max(2) / 7 + 1e-12
    whole = np.round(grouped / scale[:, :, None]) * np.sign(factor)[:, None, None]
    whole = (np.clip(whole, -8, 7) + 8).reshape(weights.shape).astype(np.uint8)
    scale = np.maximum(scale * np.abs(factor)[:, None], 1e-6).astype(np.float16)
    return whole[:, 0::2] | whole[:, 1::2] << 4, scale


def packed(trained: dict[str, Any], listed: list[Any], direction: str) -> dict[str, Any]:
    """A network as it is shipped."""
    arrays: dict[str, Any] = {name: trained[name] for name in ("layers", "mean", "std")}
    arrays["plans"] = np.frombuffer(json.dumps(listed).encode(), np.uint8)
    for name, kind in (("first", np.int16), ("head", np.int8)):  # in 8 bits the first one errs more often
        arrays[name], arrays[f"{name}_scale"] = in_whole_numbers(trained[name].astype(np.float32), kind)
        arrays[f"{name}_bias"] = trained[f"{name}_bias"].astype(np.float32)
    for n in range(int(trained["layers"])):
        rounded = _in_half_bytes(trained[f"layer{n}"].astype(np.float32), trained[f"layer{n}_factor"])
        arrays[f"layer{n}"], arrays[f"layer{n}_scale"] = rounded
        arrays[f"layer{n}_bias"] = trained[f"layer{n}_bias"].astype(np.float32)
    return {f"{direction}_{name}": value for name, value in arrays.items()}


def refine(folder: Path, seconds: float) -> None:
    """Give the networks that were shipped in fewer bits a first layer in 16."""
    for direction in table.DIRECTIONS:
        with np.load(network_file(folder, direction)) as file:
            prefix = f"{direction}_"
            values = {name.removeprefix(prefix): file[name] for name in file if name.startswith(prefix)}
        arrays = refined(values, direction, folder, HELD_OUT, seconds)
        np.savez(folder / f"packed-{direction}.npz", **{f"{prefix}{name}": value for name, value in arrays.items()})


def _grown(task: tuple[str, int]) -> dict[str, Any]:
    direction, engine = task
    from drawn_convolutions.trees import grow_copied, grow_parts  # need scikit-learn

    return grow_copied(direction, engine, _labels[0]) | grow_parts(direction, engine, _labels[0])


def fit(folder: Path, out: Path, workers: int) -> None:
    """Write the files that are shipped."""
    networks: dict[str, Any] = {}
    trees: dict[str, Any] = {}
    for direction in table.DIRECTIONS:
        labels = Labels(folder, direction)
        with np.load(folder / f"packed-{direction}.npz") as file:
            networks |= dict(file)
        engines = np.array([engine for engine, _ in labels.plans])[labels.plan]
        common = [engine for engine, count in enumerate(np.bincount(engines).tolist()) if count >= LEAST_ASKED]
        _labels[:] = [labels]
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            for grown in pool.imap(_grown, [(direction, engine) for engine in common]):
                trees |= grown
    np.savez(out / PLAN_NETWORK, **networks)  # few bits do not compress
    write_arrays(out / PLAN_TREES, trees)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ask", "train", "refine", "fit"))
    parser.add_argument("folder", type=Path, help="of the answers and the networks")
    parser.add_argument("--seconds", type=float, default=200, metavar="N", help="how long each of them takes (200)")
    parser.add_argument("--workers", type=int, default=16, metavar="N", help="processes (16)")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help=f"where to begin with asking ({SEED})")
    parser.add_argument("--rate", type=float, default=1.2e-3, metavar="N", help="the highest rate of learning (0.0012)")
    parser.add_argument("--unsure", action="store_true", help="ask only where the shipped network is not sure")
    parser.add_argument("--out", type=Path, default=Path("."), metavar="DATA", help="folder for what is shipped")
    options = parser.parse_args()
    if options.what == "ask":
        ask(options.folder, options.seconds, options.workers, options.seed, options.unsure)
    elif options.what == "train":
        train(options.folder, options.seconds, options.rate)
    elif options.what == "refine":
        refine(options.folder, options.seconds)
    else:
        fit(options.folder, options.out, options.workers)


if __name__ == "__main__":
    main()
