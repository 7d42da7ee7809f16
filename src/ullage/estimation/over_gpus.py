"""One job on many GPUs, without running it on each of them.

The memory that a job requests depends on the GPU only through the kernels that libraries choose: by compute capability
and sometimes by the number of SMs. So for each capability the job runs on the GPUs with the fewest and the most SMs. If
both runs request the same memory, the GPUs in between share that run and differ only in their size and CUDA context. A
GPU on which the allocator would have to free cached memory always gets a run of its own.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.virtual.upper_bound import UNMEASURED_SHARE

Run = Callable[[GPU], Estimate]
Report = Callable[[str], None]


def estimate_over_gpus(run: Run, cards: Iterable[GPU], progress: Report | None = None) -> list[Estimate]:
    """Return an estimate for each of `cards`, in their order.

    `run` estimates the job on one GPU; `progress` gets the GPU's name. An estimate that shares the run of another GPU
    names it in `computed_on`.
    """
    cards = list(cards)
    done: dict[str, Estimate] = {}

    def run_on(card: GPU) -> Estimate:
        if card.name not in done:
            if progress is not None:
                progress(card.name)
            done[card.name] = run(card)
        return done[card.name]

    groups: dict[tuple[int, int] | None, list[GPU]] = {}
    for card in cards:
        groups.setdefault(card.compute_capability, []).append(card)
    estimates: dict[str, Estimate] = {}
    for group in groups.values():
        for card in group:
            estimates[card.name] = _shared(card, group, run_on) or run_on(card)
    return [estimates[card.name] for card in cards]


def _shared(card: GPU, group: list[GPU], run_on: Callable[[GPU], Estimate]) -> Estimate | None:
    """Return the estimate for a GPU from the run on another one; `None` if it needs its own run."""
    sizes = [other.sms for other in group if other.sms is not None]
    if card.sms is None:
        return None
    fewest = _roomiest(other for other in group if other.sms == min(sizes))
    most = _roomiest(other for other in group if other.sms == max(sizes))
    same = _roomiest(other for other in group if other.sms == card.sms)
    if card.sms in (fewest.sms, most.sms) or run_on(fewest).peaks != run_on(most).peaks:
        return _moved(run_on(same), same, card) if same.name != card.name else None
    return _moved(run_on(most), most, card)


def _roomiest(cards: Iterable[GPU]) -> GPU:
    return max(cards, key=lambda card: card.usable)


def _moved(e: Estimate, ran_on: GPU, card: GPU) -> Estimate | None:
    context = e.breakdown["context"] + (card.context or 0) - (ran_on.context or 0)
    allocated, reserved = e.peaks
    if e.without_trials is not None:  # the memory that is tried depends on the card's
        return None
    process = reserved + context
    fits = process <= card.usable
    # In between, the allocator would free cached segments and try again: only a run on this GPU can tell.
    if not fits and allocated + context <= card.usable:
        return None
    unmeasured = 0 if card.context_measured else reserved // UNMEASURED_SHARE
    was_unmeasured = 0 if ran_on.context_measured else reserved // UNMEASURED_SHARE
    contexts = [one.context_upper or one.context or 0 for one in (card, ran_on)]
    more = contexts[0] - contexts[1] + unmeasured - was_unmeasured
    needed = "CUDA out of memory." if not fits else None
    moved = replace(
        e,
        gpu=card.name,
        gpu_memory=card.usable,
        process_memory=process,
        upper=e.bound + more,
        ranks=[{**each, "upper": each["upper"] + more} for each in e.ranks],
        breakdown={**e.breakdown, "context": context},
        fits=fits,
        headroom=card.usable - process,
        out_of_memory=needed,
        measured=card.context_measured,
        computed_on=ran_on.name,
    )
    return moved if e.step_calls is None else moved.with_utilization(e.step_calls, card)
