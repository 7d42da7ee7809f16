"""Several memory runs in one process, one after the other, each on an allocator that is empty again.

To make a CUDA context and to load kernels takes seconds, in which the driver lets no other process do the same; a run
takes a tenth of one. What PyTorch's allocator does in a run depends on nothing but the run once all memory is given
back, cuBLAS's workspaces among it, so its figures are those of a fresh process. NVML's are not: kernels of earlier runs
stay loaded. Rows from a bundle therefore have no `nvml_end`; a run that does not end well is left for a fresh process.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ullage.learn.memory_run import prepare_memory, run_memory

Order = dict[str, Any]
_OUTSIDE = ("nvml_end", "nvml_ctx")


def bundle(orders: Sequence[Order], size: int, need: Callable[[Order], int]) -> list[Order]:
    """Bundles of runs that need about as much; shuffled, so that a session that is stopped leaves no size out.

    >>> [len(one["rows"]) for one in bundle([{"id": str(n)} for n in range(5)], 2, lambda order: int(order["id"]))]
    [2, 2, 1]
    """
    alike = sorted(orders, key=need)
    parts = [alike[begin : begin + size] for begin in range(0, len(alike), size)]
    random.Random(0).shuffle(parts)
    parts.sort(key=len, reverse=True)
    return [
        {
            "id": f"bundle-{number}",
            "rows": part,
            "room": max(need(order) for order in part),
            "parameters": max(int(order.get("parameters") or 500_000_000) for order in part),
        }
        for number, part in enumerate(parts)
    ]


def prepare_bundle(order: Order) -> Order:
    """Make the context."""
    torch.cuda.synchronize()
    return order


def run_bundle(order: Order, pause: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Measure one row after the other; the first that does not end well, and those after it, are left."""
    answers: dict[str, Any] = {}
    for row in order["rows"]:
        if not _emptied():
            break
        begin = time.perf_counter()
        try:
            answer = run_memory(prepare_memory(row, ask_nvml=False))
        except Exception as error:
            print(f"{row['id']}: {type(error).__name__}: {error}")
            break
        if "oom" in answer or answer["retries"]:
            break
        answers[row["id"]] = {key: value for key, value in answer.items() if key not in _OUTSIDE} | {
            "in_bundle": len(answers),
            "wall_s": round(time.perf_counter() - begin, 3),
        }
    return {"answers": answers}


def _emptied() -> bool:
    """Give everything back, so that the allocator is as in a new process."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    return torch.cuda.memory_reserved() == 0


def untied(order: Order, answer: dict[str, Any]) -> Iterator[tuple[Order, dict[str, Any] | None]]:
    """Every row of a bundle with its answer, or with `None` where it has none."""
    answers = answer.get("answers", {})
    for row in order["rows"]:
        yield row, answers.get(row["id"])
