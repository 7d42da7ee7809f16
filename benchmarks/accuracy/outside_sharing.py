"""The model of jobs that share a GPU beside pairs that others have measured.

    python benchmarks/accuracy/outside_sharing.py FOLDER

FOLDER has files of two public repositories, as far as you have them:

    colocate_info.csv, single_data.csv   S-Lab-System-Group/Lucid: simulation/data and simulation/analyzer
    *throughputs.json                    stanford-futuredata/gavel: scheduler/physical_cluster_throughputs.json

Neither tells SMACT. Lucid's table of jobs alone has what nvidia-smi calls utilization; Gavel has rates alone and in
pairs. So these are the questions that the model can be asked:

- "as read": from the utilization that was read alone (Lucid).
- "scaled": the same, times one number. nvidia-smi counts gaps between kernels as work. The number is taken from every
  other pair, and the rest is judged.
- "by name": the jobs alone as Ullage predicts them for that GPU, as far as the model is certain: ResNet-50 and
  MobileNetV3 on ImageNet, ResNet-18 on CIFAR-10.
- "by copies": each job's share of the GPU is the one with which the model says how fast two copies of it were, and
  pairs of different jobs follow from that.

Lucid's jobs ran without MPS, Gavel's with it (on the K80 and the P100 that is no more than time slicing). The figures
of the model are those that were fitted on an H200. Left out: Gavel's Recommendation, two copies of which ran at 2 to
36% of their speed, so that it is the host that they wait for.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import ullage
from ullage.hardware import gpu
from ullage.performance.result import Utilization
from ullage.performance.sharing import share_of

Pair = tuple[tuple[str, str], tuple[float, float]]  # two jobs, and the speed of each as a share of its speed alone
CARD = gpu("H200")  # only MIG would ask for it
NAMED = {
    ("ResNet50", "ImageNet"): ("torchvision:resnet50", [3, 224, 224]),
    ("ResNet-50",): ("torchvision:resnet50", [3, 224, 224]),
    ("MobileNetV3", "ImageNet"): ("torchvision:mobilenet_v3_small", [3, 224, 224]),
    ("ResNet18", "CIFAR-10"): (f"{__file__}:cifar_resnet18", [3, 32, 32]),
    ("ResNet-18",): (f"{__file__}:cifar_resnet18", [3, 32, 32]),
}
KNOWN = {"v100": "V100-16GB", "p100": "P100-16GB"}
WIDTHS = (6, 9, 10, 9, 10, 9, 10)
KERNEL_S = 5e-5  # of a usual one
WAITS = 3  # of a usual training step: two copies to the GPU, and the loss


def job(step_s: float, share: float) -> Utilization:
    """Return a job that keeps the GPU busy for a share of its step."""
    return Utilization(
        gpu=CARD.name,
        step_s=step_s,
        gpu_s=share * step_s,
        host_s=step_s,
        smact=share,
        smocc=share / 3,
        drama=0.0,
        tensor=0.0,
        power_w=200.0,
        energy_j=200.0 * step_s,
        flops=0.0,
        bytes=0.0,
        steady=True,
        kernels=max(1, round(share * step_s / KERNEL_S)),
        measured=False,
        waits=WAITS,
    )


def by_copies(steps: Mapping[str, float], pairs: Sequence[Pair], how: str) -> dict[str, Utilization]:
    """Return jobs whose share of the GPU explains the measured speed of two copies."""
    jobs = {}
    for (one, other), speeds in pairs:
        if one != other:
            continue
        low, high = 0.0, 1.0
        for _ in range(20):
            middle = (low + high) / 2
            two = [job(steps[one], middle)] * 2
            low, high = (middle, high) if share_of(two, CARD, how).slowest > fmean(speeds) else (low, middle)
        jobs[one] = job(steps[one], low)
    return jobs


def cifar_resnet18() -> Any:
    """ResNet-18 for images of 32x32: no stride and no pooling at the beginning."""
    import torch
    import torchvision

    model = torchvision.models.resnet18(num_classes=10)
    model.conv1, model.maxpool = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False), torch.nn.Identity()
    return model


def by_name(names: Iterable[str], card: str, seconds: Mapping[str, float]) -> dict[str, Utilization]:
    """Return jobs as predicted on a GPU, and print the error of their steps alone."""
    jobs = {}
    for name in names:
        known = next((source for words, source in NAMED.items() if all(word in name for word in words)), None)
        batch = re.search(r"batch size (\d+)|(\d+) [01]$", name)
        if known is not None and batch is not None:
            source, shape = known
            jobs[name] = ullage.estimate(
                ullage.Model(
                    source,
                    batch_size=int(batch[1] or batch[2]),
                    input_shape=shape,
                    optimizer="sgd",
                    precision="amp_fp16" if name.endswith(" 1") else None,
                ),
                gpu=card,
            ).utilization
    off = [abs(each.step_s - seconds[name]) / seconds[name] for name, each in jobs.items()]
    print(
        f"  step alone of {len(off)} jobs on {card}: off by {median(off):.0%} (median)" if off else f"  none on {card}"
    )
    return jobs


def show(name: str, pairs: Sequence[Pair], jobs: Mapping[str, Utilization], how: str) -> None:
    """Print the errors of speeds, next to those of one speed for all."""
    chosen = [pair for pair in pairs if all(each in jobs for each in pair[0])]
    true = [speed for _, speeds in chosen for speed in speeds]
    predicted = [each.speed for names, _ in chosen for each in share_of([jobs[one] for one in names], CARD, how).jobs]
    guess = median(true)
    keeps = [min(speeds) >= 0.8 for _, speeds in chosen]
    says = [min(pair) >= 0.8 for pair in zip(predicted[::2], predicted[1::2], strict=True)]
    right = fmean(one == other for one, other in zip(says, keeps, strict=True))
    print(
        f"{name:26}{len(chosen):6}{_relative(predicted, true):9.1%}{_relative([guess] * len(true), true):10.1%}"
        f"{_points(predicted, true):9.1f}{_points([guess] * len(true), true):10.1f}"
        f"{right:9.1%}{max(fmean(keeps), 1 - fmean(keeps)):10.1%}"
    )


def _relative(predicted: Sequence[float], true: Sequence[float]) -> float:
    return fmean(abs(one - other) / other for one, other in zip(predicted, true, strict=True))


def _points(predicted: Sequence[float], true: Sequence[float]) -> float:
    return 100 * fmean(abs(one - other) for one, other in zip(predicted, true, strict=True))


def lucid(folder: Path) -> None:
    """Judge 1,388 pairs of jobs, without MPS."""
    read = {_lucid_name(row, ""): row for row in _rows(folder / "single_data.csv")}
    steps = {name: float(row["batchsize"]) / float(row["speed"]) for name, row in read.items()}
    pairs: list[Pair] = [
        ((_lucid_name(row, "1"), _lucid_name(row, "2")), (float(row["speed1"]), float(row["speed2"])))
        for row in _rows(folder / "colocate_info.csv")
    ]
    used = {name: float(row["gpu_util"]) / 100 for name, row in read.items()}
    show("Lucid, as read", pairs, {name: job(steps[name], share) for name, share in used.items()}, "time-slicing")

    def scaled(factor: float) -> dict[str, Utilization]:
        return {name: job(steps[name], factor * share) for name, share in used.items()}

    def off(factor: float) -> float:
        jobs = scaled(factor)
        shared = [share_of([jobs[name] for name in names], CARD, "time-slicing") for names, _ in pairs[::2]]
        predicted = [one.speed for each in shared for one in each.jobs]
        return _relative(predicted, [speed for _, speeds in pairs[::2] for speed in speeds])

    factor = min((percent / 100 for percent in range(50, 105, 5)), key=off)
    show(f"Lucid, scaled by {factor:g}", pairs[1::2], scaled(factor), "time-slicing")
    show("Lucid, by name", pairs, by_name(read, "RTX-3090", steps), "time-slicing")
    mixed = [pair for pair in pairs if pair[0][0] != pair[0][1]]
    show("Lucid, by copies", mixed, by_copies(steps, pairs, "time-slicing"), "time-slicing")


def _lucid_name(row: Mapping[str, str], place: str) -> str:
    return " ".join(row[f"{key}{place}"] for key in ("model", "dataset", "batchsize", "amp"))


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def gavel(file: Path) -> None:
    """Judge pairs of jobs on each of three GPUs, with MPS."""
    for card, table in json.loads(file.read_text()).items():
        if card.endswith("_unconsolidated"):
            continue
        alone = {
            name: beside["null"]
            for name, beside in table.items()
            if name.endswith(", 1)") and beside["null"] > 0 and "Recommendation" not in name
        }
        pairs: list[Pair] = []
        for name in alone:
            for other, rates in table[name].items():
                if other in alone and name <= other and min(rates) > 0:
                    pairs.append(((name, other), (rates[0] / alone[name], rates[1] / alone[other])))
        steps = {name: 1 / rate for name, rate in alone.items()}
        mixed = [pair for pair in pairs if pair[0][0] != pair[0][1]]
        how = "mps" if card == "v100" else "time-slicing"  # older GPUs run one process's kernels at a time
        if card in KNOWN:
            show(f"Gavel {card.upper()}, by name", pairs, by_name(alone, KNOWN[card], steps), how)
        show(f"Gavel {card.upper()}, by copies", mixed, by_copies(steps, pairs, how), how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if not folder.is_dir():
        parser.error(f"no folder {folder}")
    heads = zip(("count", "error", "constant", "points", "constant", "keep 80%", "constant"), WIDTHS, strict=True)
    print(f"{'pairs':26}" + "".join(f"{head:>{width}}" for head, width in heads))
    if (folder / "colocate_info.csv").is_file():
        lucid(folder)
    for file in sorted(folder.glob("*throughputs.json")):
        gavel(file)


if __name__ == "__main__":
    main()
