"""The idle time of a rank in a schedule of `torch.distributed.pipelining`, by its order of work."""

from collections.abc import Mapping, Sequence
from typing import Any

from ullage.virtual.distributed.objects import caller

# Forward, the gradients of inputs, those of weights, and both at once, in passes of equal length.
_LENGTHS = {"F": 1, "I": 1, "W": 1, "B": 2}


def bubble_of_schedule() -> float | None:
    """Return this rank's idle time over its own in the running schedule; `None` outside of one, and for GPipe and 1F1B,
    whose order cannot be trusted and whose bubble follows from their messages."""
    running = caller("_step_microbatches")
    schedule: Any = None if running is None else running.f_locals.get("self")
    order: Any = getattr(schedule, "pipeline_order", None)
    if not order or not hasattr(schedule, "_stages"):
        return None
    return bubble({number: list(_passes(actions)) for number, actions in order.items()}, schedule.rank)


def _passes(actions: Sequence[Any]) -> Any:
    """Iterate over passes as kind, stage and micro-batch, without sends and gathers."""
    for action in actions:
        if action is None:
            continue
        for each in getattr(action, "sub_actions", None) or (action,):
            if (kind := each.computation_type.value) in _LENGTHS:
                yield kind, each.stage_index, each.microbatch_index


def bubble(order: Mapping[int, Sequence[tuple[str, int, int]]], rank: int) -> float | None:
    """Return the idle time of a rank over that of its own passes; `None` if the order does not end. A pass begins when
    its rank is free and its inputs are there. Stages are assumed equal, and messages instant."""
    last = max((stage for passes in order.values() for _, stage, _ in passes), default=0)
    ends: dict[tuple[str, int, int], int] = {}
    free, done = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    moved = True
    while moved:
        moved = False
        for number, passes in order.items():
            while done[number] < len(passes):
                kind, stage, batch = passes[done[number]]
                needed = [("I", stage, batch)] if kind == "W" else [("F", stage, batch)]
                if kind == "F":
                    needed = [("F", stage - 1, batch)] if stage else []
                elif kind != "W" and stage < last:
                    needed.append(("I", stage + 1, batch))
                if any(each not in ends for each in needed):
                    break
                begin = max([free[number], *(ends[each] for each in needed)])
                free[number] = begin + _LENGTHS[kind]
                ends[kind if kind in "FW" else "I", stage, batch] = free[number]
                done[number] += 1
                moved = True
    own = sum(_LENGTHS[kind] for kind, _, _ in order.get(rank, ()))
    if not own or any(done[number] < len(passes) for number, passes in order.items()):
        return None
    return max(free.values()) / own - 1
