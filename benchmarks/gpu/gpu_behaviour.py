"""How a GPU and its driver behave when training jobs come and go: what a simulated GPU has to be told.

    python benchmarks/gpu/gpu_behaviour.py FILE [--parts lag,room,power,alone,beside,mps] [--kinds resnet50,gpt2]

- `alone`: a training job of each kind by itself: from its start until PyTorch is there, until its memory is taken and
  until its first step is done, how long a step takes, and the GPU's memory over time.
- `beside`, `mps`: the same for 2, 4 and 8 jobs that start together, time-sliced and through MPS.
- `lag`: how long it takes until NVML tells of memory that was taken, given back, or whose process was killed.
- `room`: the largest block that can be had, beside what NVML says is free, while processes take and give back memory
  and come and go.
- `power`: what the GPU draws with nothing on it, and with processes that hold memory and do nothing.

It needs a GPU that nobody else uses, and pynvml (nvidia-ml-py). One JSON object a line, written as it goes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from manager_trace import KINDS, Kind, words
from ullage.hardware.mps import MpsService

GIB, MIB = 1 << 30, 1 << 20
PARTS = ("lag", "room", "power", "alone", "beside", "mps")
SHARE, COUNTS = 0.4, (2, 4, 8)  # of each kind's steps; jobs that start together
ROUNDS, REST, SEED = 12, 4.0, 7  # of taking and giving back memory; seconds for which power is read
DIRECT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor is a block of the driver's


class Card:
    """The first GPU, as NVML sees it."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self.name = str(pynvml.nvmlDeviceGetName(self._handle))

    @property
    def used(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    @property
    def free(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).free)

    @property
    def watts(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000

    @property
    def joules(self) -> float:
        """What it has drawn since the driver was loaded."""
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1000


class Holder:
    """A process with a CUDA context that takes and gives back memory when it is told to."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--hold"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | DIRECT
        )

    def ask(self, *words: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def hold() -> None:
    """What a holder does: lines with orders come in, JSON goes out."""
    import torch

    blocks: dict[int, torch.Tensor] = {}
    torch.empty(1, device="cuda")
    for line in sys.stdin:
        order, *given = line.split()
        values = [int(value) for value in given]
        answer: Any = True
        if order == "take":
            number, size = values
            with contextlib.suppress(RuntimeError):  # without the cache, too little memory is any CUDA error
                blocks[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
            answer = {"taken": number in blocks, "at": time.monotonic()}
        elif order == "give":
            answer = {"given": blocks.pop(values[0], None) is not None, "at": time.monotonic()}
        elif order == "largest":
            answer = largest(values[0])
        print(json.dumps(answer), flush=True)


def largest(most: int) -> int:
    """The largest block up to so many bytes that can be had, to 2 MiB."""
    import torch

    low, high = 0, most // (2 * MIB) + 1
    while high - low > 1:
        middle = (low + high) // 2
        try:
            torch.empty(middle * 2 * MIB, dtype=torch.uint8, device="cuda")
            low = middle
        except RuntimeError:
            high = middle
    return low * 2 * MIB


@contextlib.contextmanager
def holders(count: int) -> Iterator[list[Holder]]:
    made = [Holder() for _ in range(count)]
    try:
        for each in made:
            each.ask("ready")
        yield made
    finally:
        for each in made:
            each.end()


def lag(card: Card) -> Iterator[dict[str, Any]]:
    """How late NVML tells of memory, in seconds after the call or the kill returned; negative: before it returned."""

    def until(change: int, before: int) -> float:
        limit = time.monotonic() + 3  # what is not seen by then counts as this
        while time.monotonic() < limit:
            used = card.used
            if (used - before) * (1 if change > 0 else -1) >= abs(change) * 0.9:
                return time.monotonic()
        return limit

    size = 8 * GIB
    with holders(1) as (one,):
        for number in range(8):
            before = card.used
            answer = one.ask("take", number, size)
            yield {"what": "taken", "seconds": until(size, before) - answer["at"]}
            before = card.used
            answer = one.ask("give", number)
            yield {"what": "given back", "seconds": until(-size, before) - answer["at"]}
    for _ in range(2):
        with holders(1) as (one,):
            empty = card.used
            one.ask("take", 0, size)
            until(size, empty)
            before = card.used
            at = time.monotonic()
            one.end()
            ended = time.monotonic()
            yield {"what": "killed", "seconds": until(-size, before) - ended, "kill_s": ended - at}


def room(card: Card) -> Iterator[dict[str, Any]]:
    """The largest block beside what is free, with 2 to 6 processes that fill the card, take and give back."""
    draw = random.Random(SEED)
    for count in (2, 4, 6):
        with holders(count + 1) as (probe, *others):
            taken: dict[tuple[int, int], int] = {}
            number = 0
            for step in range(ROUNDS):
                for _ in range(12):  # blocks as PyTorch asks for them: 20 MiB, and larger ones in steps of 2 MiB
                    place = draw.randrange(len(others))
                    mine = [key for key in taken if key[0] == place]
                    if mine and (draw.random() < 0.4 or card.free < 6 * GIB):
                        key = draw.choice(mine)
                        others[place].ask("give", key[1])
                        del taken[key]
                    else:
                        size = draw.choice(
                            [20 * MIB, 2 * MIB * draw.randint(11, 500), 2 * MIB * draw.randint(500, 5000)]
                        )
                        number += 1
                        if others[place].ask("take", number, size)["taken"]:
                            taken[place, number] = size
                if step % 4 == 3:  # one process ends, another one comes
                    place = draw.randrange(len(others))
                    others[place].end()
                    taken = {key: size for key, size in taken.items() if key[0] != place}
                    others[place] = Holder()
                    others[place].ask("ready")
                free = card.free
                yield {
                    "processes": count,
                    "step": step,
                    "blocks": len(taken),
                    "free": free,
                    "largest": probe.ask("largest", free),
                }
            for each in others:
                each.end()


def power(card: Card) -> Iterator[dict[str, Any]]:
    """What is drawn at rest, with 0, 1, 4 and 8 processes."""

    def rest(count: int, held: int) -> dict[str, Any]:
        time.sleep(1)
        before, began, watts = card.joules, time.monotonic(), []
        while time.monotonic() < began + REST:
            watts.append(card.watts)
            time.sleep(0.1)
        spent = (card.joules - before) / (time.monotonic() - began)
        return {
            "processes": count,
            "held": held,
            "watts": statistics.mean(watts),
            "by_energy": spent,
            "used": card.used,
        }

    yield rest(0, 0)
    for count in (1, 4, 8):
        with holders(count) as made:
            yield rest(count, 0)
            if count == 4:
                for each in made:
                    each.ask("take", 0, 20 * GIB)
                yield rest(count, 80 * GIB)
    yield rest(0, 0)


def trainings(card: Card, kinds: Sequence[Kind], more: Mapping[str, str]) -> dict[str, Any]:
    """Start jobs together: what each tells, and the GPU's memory and power until the last one is over."""
    before, began, mono = card.used, time.time(), time.monotonic()
    energy = card.joules
    jobs = [
        subprocess.Popen(words(kind, SHARE), stdout=subprocess.PIPE, env=os.environ | more, text=True) for kind in kinds
    ]
    curve: list[tuple[float, int]] = []
    ends: dict[int, float] = {}
    try:
        while len(ends) < len(jobs) and time.monotonic() < mono + 90:
            used = card.used - before
            if not curve or abs(used - curve[-1][1]) >= 8 * MIB:
                curve.append((round(time.monotonic() - mono, 3), used))
            for place, job in enumerate(jobs):
                if place not in ends and job.poll() is not None:
                    ends[place] = time.time()
            time.sleep(0.01)
    finally:
        for job in jobs:
            job.kill()
    each = []
    for place, (kind, job) in enumerate(zip(kinds, jobs, strict=True)):
        assert job.stdout is not None
        try:
            result = json.loads(job.stdout.read())
            result = {
                name: round(value - began, 3) if isinstance(value, float) else value for name, value in result.items()
            }
        except ValueError:
            result = {"failed": job.wait()}
        each.append({"kind": kind.name, "ended": round(ends.get(place, began) - began, 3), **result})
    return {"jobs": each, "memory": curve, "energy_j": card.joules - energy, "seconds": time.monotonic() - mono}


def together(card: Card, kinds: Sequence[Kind], more: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Several that start at once, the kinds in turn."""
    for count in COUNTS:
        yield trainings(card, [kinds[place % len(kinds)] for place in range(count)], more)


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """A service of MPS, by the variables through which jobs find it."""
    with tempfile.TemporaryDirectory(prefix="ullage-mps-") as folder:
        service = MpsService(Path(folder))
        service.start()
        try:
            yield service.environment
        finally:
            service.stop()


def through_mps(card: Card, kinds: Sequence[Kind]) -> Iterator[dict[str, Any]]:
    """The same as `together`, through MPS."""
    with mps() as variables:
        yield from together(card, kinds, variables)


def measure(options: argparse.Namespace, card: Card) -> Iterator[dict[str, Any]]:
    """All rows, part by part; a part that fails leaves the others alone."""
    kinds = [kind for kind in KINDS if kind.name in options.kinds.split(",")]
    parts = {
        "lag": lambda: lag(card),
        "room": lambda: room(card),
        "power": lambda: power(card),
        "alone": lambda: (trainings(card, [kind], {}) for kind in kinds),
        "beside": lambda: together(card, kinds, {}),
        "mps": lambda: through_mps(card, kinds),
    }
    for part in options.parts.split(","):
        began = time.monotonic()
        try:
            for row in parts[part]():
                yield {"part": part, "gpu": card.name, **row}
        except Exception:
            traceback.print_exc()
        print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="where rows are appended")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--kinds", default="resnet18_cifar,efficientnet_cifar,resnet50,mobilenet,vgg16,bert_base,gpt2")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        hold()
        return
    if options.file is None:
        parser.error("needed a file for the rows")
    with options.file.open("a") as file:
        for row in measure(options, Card()):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
