"""The sharing experiments of the dissertation's chapter 4 on this machine's GPU, and what Ullage predicts for them.

    python benchmarks/dissertation/collocated_epochs.py measure --out FILE [--loaders 0,4] [--seconds 1.5]
    python benchmarks/dissertation/collocated_epochs.py compare [FILE] [--write]

`measure` needs a GPU. It runs the five vision models of Table 4.1, alone and in copies and mixes, time-sliced and under
MPS, first with a batch that stays on the GPU (0 loader processes) and then with timm's own loader, which decodes and
augments images in that many processes for each job (not for pictures of ImageNet's size: decoding them keeps a GPU of
this speed waiting in any case). The recommender is left out: its 24 billion parameters fit neither
here nor on one GPU of the chapter. `compare` puts the measured slowdowns beside those of `ullage share`, for the GPU
that was measured and for the chapter's A100, and writes the tables of lab/docs/collocation.md.
"""

import argparse
import io
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import collocation
import ullage
from ullage_lab.measure.job_sets import JobSet
from ullage_lab.measure.together import TogetherSettings, measure_together

DATA = Path(__file__).parents[1] / "data" / "collocated_epochs_h200.jsonl"
PAGE = Path(__file__).parents[2] / "lab" / "docs" / "collocation.md"
Row = dict[str, Any]
HOWS = ("time-slicing", "mps")
COPIES = (2, 3, 7)
# id: model, side of the images (CIFAR-10's, ImageNet64's or ImageNet's), batch size, estimated MiB of reserved memory
JOBS = {
    "resnet26-128": ("timm:resnet26", 32, 128, 442),
    "resnet26-32": ("timm:resnet26", 32, 32, 370),
    "resnet50-128": ("timm:resnet50", 64, 128, 1402),
    "resnet50-32": ("timm:resnet50", 64, 32, 578),
    "efficientnet-128": ("timm:tf_efficientnetv2_s", 64, 128, 2022),
    "cait-128": ("timm:cait_xxs24_224", 224, 128, 16368),
    "resnet152-32": ("timm:resnet152", 224, 32, 6834),
}
SMALL, MEDIUM, LARGE = "resnet26-32", "resnet50-32", "resnet152-32"
MIXES = {
    "S+M": (SMALL, MEDIUM),
    "S+L": (SMALL, LARGE),
    "M+L": (MEDIUM, LARGE),
    "S+M+M": (SMALL, MEDIUM, MEDIUM),
    "S+S+M+M": (SMALL, SMALL, MEDIUM, MEDIUM),
    "S+M+M+M": (SMALL, MEDIUM, MEDIUM, MEDIUM),
    "S+M+L": (SMALL, MEDIUM, LARGE),
}


def job_rows() -> list[Row]:
    same = {"opt": "sgdm", "precision": "fp32"}
    return [
        {"id": name, "model": model, "input": [3, side, side], "batch": batch, "peak_reserved": reserved << 20} | same
        for name, (model, side, batch, reserved) in JOBS.items()
    ]


def job_sets() -> list[JobSet]:
    copies = [JobSet(id=f"{name} x {count}", jobs=(name,) * count) for name in JOBS for count in COPIES]
    return copies + [JobSet(id=name, jobs=jobs) for name, jobs in MIXES.items()]


# Training with a loader


@cache
def _pictures(side: int) -> list[bytes]:
    """Return 64 pictures as files: PNG up to 64 pixels, as for CIFAR-10 and ImageNet64, and larger ones as JPEG."""
    from PIL import Image

    drawn = random.Random(side)
    files = []
    for _ in range(64):
        size = (side, side) if side <= 64 else (500, 375)  # about the median of ImageNet
        coarse = Image.new("RGB", (16, 16))
        coarse.putdata([(drawn.randrange(256), drawn.randrange(256), drawn.randrange(256)) for _ in range(256)])
        file = io.BytesIO()
        coarse.resize(size).save(file, "PNG" if side <= 64 else "JPEG", quality=90)
        files.append(file.getvalue())
    return files


class Pictures:
    """A data set without an end that decodes and augments pictures as timm's training script does."""

    def __init__(self, side: int) -> None:
        from timm.data import create_transform

        self.files = _pictures(side)
        self.transform = create_transform(side, is_training=True, color_jitter=0.4, use_prefetcher=True)

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, number: int) -> Any:
        from PIL import Image

        return self.transform(Image.open(io.BytesIO(self.files[number % len(self.files)])).convert("RGB"))


def prepare_with_loader(row: Row, workers: int) -> tuple[Any, Iterator[Any]]:
    """Make the model, and start the loader's processes before CUDA."""
    import numpy
    import torch
    from torch.utils.data import DataLoader

    from ullage_lab.measure.utilization import prepare_utilization

    torch.set_num_threads(1)

    def collate(arrays: list[Any]) -> Any:
        return torch.from_numpy(numpy.stack(arrays))

    batches = (range(first, first + row["batch"]) for first in range(0, 1 << 40, row["batch"]))
    loader: DataLoader[Any] = DataLoader(
        Pictures(row["input"][1]),  # type: ignore[arg-type]
        batch_sampler=batches,  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=collate,
    )
    iterator = iter(loader)
    next(iterator)
    return prepare_utilization(row), iterator


def run_with_loader(prepared: tuple[Any, Iterator[Any]], after_step: Callable[[], None]) -> None:
    """Train; fetch a batch and send it to the GPU for each step."""
    from ullage_lab.measure.together import _run

    run, batches = prepared

    def step() -> None:
        images = next(batches).to("cuda", non_blocking=True)
        images.float().sub_(127.5).div_(60.0)  # as timm's prefetcher does, on the GPU
        after_step()

    _run(run, step)


def measure(options: argparse.Namespace) -> None:
    for workers in map(int, options.loaders.split(",")):
        out = options.out.with_name(f"{options.out.name}.{workers}")
        loader = {"prepare": partial(prepare_with_loader, workers=workers), "run": run_with_loader} if workers else {}
        settings = TogetherSettings(out=out, seconds=options.seconds, **loader)
        sets = [one for one in job_sets() if not workers or (one.id not in MIXES and JOBS[one.jobs[0]][1] <= 64)]
        left, rows = measure_together(job_rows(), sets, settings)
        print(f"{left} sets with {workers} loader processes", flush=True)
        for row in rows:
            print(row["how"], row.get("set", row.get("alone")), row.get("slowdown", row.get("failed")), flush=True)
        with options.out.open("a") as file:
            file.writelines(json.dumps({"loaders": workers, **json.loads(line)}) + "\n" for line in out.open())
        out.unlink()


def measured(file: Path) -> dict[tuple[int, str, str], Row]:
    """Return the rows by loader processes, way of sharing and set; jobs alone by their ids."""
    rows: dict[tuple[int, str, str], Row] = {}
    for row in map(json.loads, file.open()):
        if "how" in row and "failed" not in row:
            rows[row["loaders"], row["how"], row.get("set") or row["alone"]] = row
    return rows


def predicted(gpu: str) -> dict[tuple[str, str], float]:
    """Return the mean slowdown of each set by way of sharing, as `ullage share` has it."""
    alone = {}
    for name, (model, side, batch, _) in JOBS.items():
        one = ullage.Model(model, batch_size=batch, input_shape=(3, side, side), optimizer="sgdm")
        alone[name] = ullage.estimate(one, gpu=gpu)
    slowdowns = {}
    for one_set in job_sets():
        for how in HOWS:
            sharing = ullage.share([alone[name] for name in one_set.jobs], gpu=gpu, how=how)
            slowdowns[how, one_set.id] = statistics.fmean(1 / job.speed for job in sharing.jobs)
    return slowdowns


def slowdowns_table(rows: dict[tuple[int, str, str], Row]) -> str:
    here, there = predicted("H200"), predicted("A100-40GB")
    slow = {key: statistics.fmean(row["slowdown"]) for key, row in rows.items() if "set" in row}
    lines = []
    for one in job_sets():
        for how, words in collocation.HOWS.items():
            figures = slow[0, how, one.id], here[how, one.id], slow.get((4, how, one.id)), there[how, one.id]
            lines.append([one.id, words, *("-" if figure is None else f"{figure:.2f}" for figure in figures)])
    head = ["jobs", "shared", "measured", "predicted", "measured, with loaders", "predicted for an A100"]
    words = []
    for how in HOWS:
        off = [math.exp(abs(math.log(here[how, one.id] / slow[0, how, one.id]))) - 1 for one in job_sets()]
        words.append(f"{collocation.HOWS[how]} {statistics.median(off):.0%} ({max(off):.0%} at worst)")
    return f"{collocation.table(head, lines)}\n\nError of the predictions, median: {', '.join(words)}."


def energy_table(rows: dict[tuple[int, str, str], Row]) -> str:
    """Figures 4.1b, 4.5 and 4.6: SMACT, power, and the energy of a step of one copy."""
    lines = []
    for name in JOBS:
        for copies in (1, *COPIES):
            cells = []
            for how in HOWS:
                row = rows[0, how, name if copies == 1 else f"{name} x {copies}"]
                energy = row["power_w"] / sum(1 / step for step in row["step_s"])
                cells.append(f"{row['smact']:.0%}, {row['power_w']:.0f} W, {energy:.2f} J")
            lines.append([name, str(copies), *cells])
    return collocation.table(["job", "copies", *collocation.HOWS.values()], lines)


def compare(options: argparse.Namespace) -> None:
    rows = measured(options.file)
    collocation.show({"epochs": slowdowns_table(rows), "epochs energy": energy_table(rows)}, PAGE, options.write)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("measure")
    one.set_defaults(run=measure)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--loaders", default="0,4", help="loader processes of each job (default: %(default)s)")
    one.add_argument("--seconds", type=float, default=1.2)
    two = commands.add_parser("compare")
    two.set_defaults(run=compare)
    two.add_argument("file", type=Path, nargs="?", default=DATA)
    two.add_argument("--write", action="store_true")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
