"""Runs a pass on snapshots of GPUs and jobs: decides which jobs start where, and why the others wait."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ullage.manager.placement.fairness import in_order
from ullage.manager.placement.gpus import HostLeft, gpus_of
from ullage.manager.placement.ledger import Ledger
from ullage.manager.placement.plan import Situation, best_plan
from ullage.manager.placement.policies import Policy, find_policy
from ullage.manager.placement.reasons import JobName, PassOutcome, PassSummary, Waiting
from ullage.manager.placement.rules import Rules
from ullage.manager.placement.snapshot import Job, Running, Slot, by_slot


def decide(
    policy: str | Policy,
    waiting: Sequence[Job],
    running: Sequence[Running],
    slots: Sequence[Slot],
    ledger: Ledger,
    rules: Rules,
    now: float,
    usage: Mapping[str, float] | None = None,
    name: JobName = str,
) -> PassOutcome:
    """Decide which jobs start where. The ledger is unchanged: record each `Decision` with `ledger.accept(decision)`.

    `usage` is the recent usage of each user in GPU-seconds, for the fair order. `slots` is the newest snapshot; the
    ledger also uses it. A running job that is not in the ledger counts with its promise. `name` names jobs in reasons.

    >>> from ullage.manager.placement import Activity
    >>> slot = Slot("GPU-1", 0, "A100-40GB", total=40 << 30, used=0, activity=Activity(smact=0.1))
    >>> jobs = [Job(1, "ada", 0.0, promise=30 << 30), Job(2, "ada", 1.0, promise=30 << 30)]
    >>> outcome = decide("ullage", jobs, [], [slot], Ledger(), Rules(), now=2.0)
    >>> outcome.placed[0].job, outcome.placed[0].memory
    (1, {'GPU-1': 32212254720})
    >>> outcome.waiting[0].reason
    'needs 30.0 GiB on a GPU; GPU 0 has the most free, 10.0 GiB; GPU 0 will have room when job 1 ends'
    """
    book = ledger.copy()
    book.see(slots)
    known = book.jobs()
    for each in running:
        if each.job.id not in known:
            memory = by_slot(each.slots, each.job.promise, each.job.promises)
            book.adopt(each.job.id, memory, each.job.exclusive, each.job.host)
    arrays = Counter(each.job.array for each in running)
    gpus = gpus_of(slots, book, running, rules, now)
    last = next((gpu.position for gpu in gpus if gpu.slot.id == book.last), -1)
    queue = in_order(waiting, arrays, rules, now, usage)
    host = HostLeft.of(book, running, now)
    situation = Situation(queue, gpus, host, frozenset(book.jobs()), arrays, last, rules, now)
    made = best_plan(situation, find_policy(policy) if isinstance(policy, str) else policy)
    end = PassSummary(made, rules, now, name)
    return PassOutcome(tuple(made.placed), tuple(Waiting(job.id, job, end, behind) for job, behind in made.left))
