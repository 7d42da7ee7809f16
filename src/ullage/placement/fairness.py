"""The order of the queue: recovery, priority, fair share, arrival."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ullage.placement.rules import Rules
from ullage.placement.snapshot import Job


def waited(job: Job, now: float) -> float:
    """How long a job has been in the queue, this time.

    >>> waited(Job(1, "ada", submitted=0.0, queued=40.0), now=100.0)
    60.0
    """
    return now - (job.submitted if job.queued is None else job.queued)


def effective_priority(job: Job, rules: Rules, now: float) -> int:
    """The priority, one higher for every `rules.ageing` seconds of waiting, so that nobody waits for ever."""
    return job.priority + (0 if rules.ageing is None else max(int(waited(job, now) / rules.ageing), 0))


def fair_order(jobs: Sequence[Job], rules: Rules, now: float, usage: Mapping[str, float] | None = None) -> list[Job]:
    """Jobs in the order in which they may choose: recovery first, then priority, fair share and arrival.

    Fair share: every user has an account that starts at his recent `usage` (GPU-seconds). His jobs, in his own
    order, each stand at the account's level divided by his share, and raise it by `rules.turn` for each GPU. So users
    with equal shares alternate, one with twice the share has two turns, and one who used much lately comes later.

    >>> queue = [Job(1, "ada", 0.0), Job(2, "ada", 1.0), Job(3, "bob", 2.0)]
    >>> [job.id for job in fair_order(queue, Rules(), now=10.0)]
    [1, 3, 2]
    """
    ageing = rules.ageing
    if ageing is None or all(now - job.submitted < ageing for job in jobs):
        priorities = [job.priority for job in jobs]
    else:
        priorities = [effective_priority(job, rules, now) for job in jobs]
    # The number is there so that two jobs themselves are never compared.
    keyed = [
        (not job.recovery, -priority, job.submitted, job.id, number, job)
        for number, (job, priority) in enumerate(zip(jobs, priorities, strict=True))
    ]
    keyed.sort()
    if not rules.fair or len({job.user for job in jobs}) < 2:
        return [job for *_, job in keyed]
    accounts = dict(usage or {})
    turns = []
    for number, (not_recovery, priority, _, _, _, job) in enumerate(keyed):
        account = accounts.get(job.user, 0.0)
        accounts[job.user] = account + rules.turn * job.gpus
        turns.append((not_recovery, priority, account / job.share, job.submitted, number, job))
    turns.sort()
    return [job for *_, job in turns]


def recent_usage(
    spans: Iterable[tuple[str, int, float, float]], now: float, half_life: float = 24 * 3600.0
) -> dict[str, float]:
    """GPU-seconds by user from (user, GPUs, start, end), halved for every half-life that has passed since.

    >>> recent_usage([("ada", 2, 0.0, 100.0)], now=100.0 + 24 * 3600.0)
    {'ada': 100.0}
    """
    used: dict[str, float] = {}
    for user, gpus, start, end in spans:
        weight = 0.5 ** (max(now - end, 0.0) / half_life)
        used[user] = used.get(user, 0.0) + gpus * max(end - start, 0.0) * weight
    return used
