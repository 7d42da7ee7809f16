"""Placement of jobs on GPUs: snapshots of GPUs and jobs, the ledger of promised memory, and the policies.

Pure functions and values: no input or output, no clock, no PyTorch. The manager and the simulator both call them.
Read `plan.py` first: a pass over the queue, from top to bottom.
"""

from ullage.manager.placement.deciding import decide
from ullage.manager.placement.fairness import Account, UsageAccounts, claimed, decay, fair_order, held, part_of_gpu
from ullage.manager.placement.ledger import Ledger
from ullage.manager.placement.policies import policies
from ullage.manager.placement.reasons import PassOutcome, Waiting
from ullage.manager.placement.recovery import Failure, RecoveryRules, after_failure
from ullage.manager.placement.rules import Rules, Speeds
from ullage.manager.placement.snapshot import Activity, Booking, Decision, HostShare, Job, Running, Slot, by_slot

__all__ = [
    "Account",
    "Activity",
    "Booking",
    "Decision",
    "Failure",
    "HostShare",
    "Job",
    "Ledger",
    "PassOutcome",
    "RecoveryRules",
    "Rules",
    "Running",
    "Slot",
    "Speeds",
    "UsageAccounts",
    "Waiting",
    "after_failure",
    "by_slot",
    "claimed",
    "decide",
    "fair_order",
    "decay",
    "held",
    "part_of_gpu",
    "policies",
]
