"""The program that runs in place of a recorded job: it takes the job's memory, keeps the GPU as busy, and ends when the
work is done, all `speed` times faster.

On virtual cards, jobs that share a card are slowed by the sum of the times that they keep it busy. On a real GPU,
matrix products keep it busy. If memory runs out, the program fails like a training job in PyTorch.
"""

import json
import os
import sys
import time
from typing import Any, NamedTuple

from ullage.hardware import gpu as find_gpu
from ullage.units import GIB, MIB
from ullage.virtual.shared_card.cards import VARIABLE, Card, Cards, DeclaredActivity

_STARTUP, _GROWTH = 10.0, 5.0  # seconds of a real job until it allocates, and until it holds all of its memory
_PARTS = 20  # in which it takes its memory
_LOOK = 0.2  # seconds after which it looks at its neighbours again
_SIDE, _PERIOD = 8192, 0.1  # of matrices, and seconds between two series of products


class StandIn(NamedTuple):
    """A job: its number, bytes on each GPU, seconds of work alone, its activity alone, and how much faster it runs."""

    job: int
    memory: int
    work_s: float
    gract: float
    smact: float
    speed: float

    @property
    def command(self) -> list[str]:
        """Return the command to submit."""
        code = "from ullage.virtual.shared_card.stand_in import main; main()"
        return [sys.executable, "-c", code, json.dumps(self._asdict())]


def main() -> None:
    began = time.monotonic()
    job = StandIn(**json.loads(sys.argv[1]))
    time.sleep(max(0.0, _STARTUP / job.speed - (time.monotonic() - began)))
    if VARIABLE in os.environ:
        _on_virtual_cards(job, Cards.open(os.environ[VARIABLE]).visible(os.environ.get("CUDA_VISIBLE_DEVICES")))
    else:
        _on_gpus(job)


def _on_virtual_cards(job: StandIn, cards: list[Card]) -> None:
    part, held = -(-job.memory // _PARTS), 0
    while held < job.memory:
        size = min(part, job.memory - held)
        for card in cards:
            if not card.take(size):
                _run_out_of_memory(card, size, held)
            card.declare(DeclaredActivity(job.gract, job.smact))
        held += size
        time.sleep(_GROWTH / _PARTS / job.speed)
    left, before = job.work_s / job.speed, time.monotonic()
    while left > 0:
        speed = min(map(_speed, cards), default=1.0)
        time.sleep(min(_LOOK, left / speed))
        now = time.monotonic()
        left, before = left - (now - before) * speed, now


def _speed(card: Card) -> float:
    """Return the speed of jobs on a card, as a share of that alone."""
    return 1.0 / max(1.0, sum(each.gract for each in card.activities().values() if each is not None))


def _run_out_of_memory(card: Card, size: int, held: int) -> None:
    sys.exit(
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB. GPU {card.index} has a "
        f"total capacity of {card.total / GIB:.2f} GiB of which {card.free() / MIB:.2f} MiB is free. Including "
        f"non-PyTorch memory, this process has {held / MIB:.2f} MiB memory in use."
    )


def _on_gpus(job: StandIn) -> None:
    import torch

    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    factors = [torch.randn(_SIDE, _SIDE, device=device, dtype=torch.float16) for device in devices]
    products = [factor @ factor for factor in factors]
    kept: list[Any] = []
    for device in devices:
        context = find_gpu(torch.cuda.get_device_name(device)).context
        rest = max(0, job.memory - context - torch.cuda.memory_reserved(device))
        kept += [torch.empty(rest // _PARTS, dtype=torch.uint8, device=device) for _ in range(_PARTS)]
    quickest, left = float("inf"), job.work_s / job.speed
    while left > 0:
        began = time.monotonic()
        count = max(1, round(job.smact * _PERIOD / quickest))
        for factor, product in zip(factors, products, strict=True):
            for _ in range(count):
                torch.mm(factor, factor, out=product)
        for device in devices:
            torch.cuda.synchronize(device)
        took = time.monotonic() - began
        quickest = min(quickest, took / count)
        time.sleep(max(0.0, _PERIOD - took))
        left -= _PERIOD
