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
from ullage.units import MIB
from ullage.virtual.shared_card.cards import VARIABLE, Card, Cards, DeclaredActivity

_STARTUP, _GROWTH = 10.0, 5.0  # seconds of a real job until it allocates, and until it holds all of its memory
_PARTS = 20  # in which it takes its memory
_LOOK, _LOOKS = 0.2, 20  # least seconds between two looks at its neighbours, and looks at most, in its time alone
_SIDE, _PERIOD = 4096, 0.1  # of matrices, and seconds between two series of products


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
        return [sys.executable, "-c", f"from {__name__} import main; main()", json.dumps(self._asdict())]


def main() -> None:
    job = StandIn(**json.loads(sys.argv[1]))
    time.sleep(_STARTUP / job.speed)
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
                sys.exit(
                    f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB. GPU "
                    f"{card.index} has {card.total / MIB:.2f} MiB of which {card.free() / MIB:.2f} MiB is free. "
                    f"Including non-PyTorch memory, this process has {held / MIB:.2f} MiB memory in use."
                )
            card.declare(DeclaredActivity(job.gract, job.smact))
        held += size
        time.sleep(_GROWTH / _PARTS / job.speed)
    left, before = job.work_s / job.speed, time.monotonic()
    while left > 0:
        busy = [sum(each.gract for each in card.activities().values() if each) for card in cards]
        speed = 1.0 / max([1.0, *busy])
        time.sleep(min(max(_LOOK, job.work_s / job.speed / _LOOKS), left / speed))
        now = time.monotonic()
        left, before = left - (now - before) * speed, now


def _on_gpus(job: StandIn) -> None:
    import torch

    factors = [torch.randn(_SIDE, _SIDE, device=f"cuda:{gpu}") for gpu in range(torch.cuda.device_count())]
    products, blocks = [factor @ factor for factor in factors], list[Any]()
    for factor in factors:
        context = find_gpu(torch.cuda.get_device_name(factor.device)).context or 0
        others = context + torch.cuda.memory_reserved(factor.device)
        blocks.append(torch.empty(max(0, job.memory - others), dtype=torch.uint8, device=factor.device))
    quickest, left = 1.0, job.work_s / job.speed  # seconds of a product, and of work
    while left > 0:
        began, count = time.monotonic(), max(1, round(job.smact * _PERIOD / quickest))
        for factor, product in zip(factors, products, strict=True):
            for _ in range(count):
                torch.mm(factor, factor, out=product)
        for factor in factors:
            torch.cuda.synchronize(factor.device)
        took = time.monotonic() - began
        quickest, left = min(quickest, took / count), left - _PERIOD
        time.sleep(max(0.0, _PERIOD - took))
