"""Where a job goes: snapshots of GPUs and jobs, the ledger of promised memory, and the policies that choose.

Pure functions and values: no input or output, no clock, no PyTorch. The manager and the simulator both call them.
"""

from ullage.manager.placement.board import Board
from ullage.manager.placement.deciding import decide, place
from ullage.manager.placement.fairness import Account, UsageAccounts, claimed, faded, fair_order, held, part_of_gpu
from ullage.manager.placement.ledger import Ledger
from ullage.manager.placement.outcome import Decision, Keeping, PassOutcome, Waiting, by_slot
from ullage.manager.placement.policies import policies
from ullage.manager.placement.recovery import Failure, RecoveryRules, RetryDecision, after_failure
from ullage.manager.placement.rules import Rules, Speeds
from ullage.manager.placement.snapshot import Activity, Booking, HostShare, Job, Running, Slot

__all__ = [
    "Account", "Activity", "Board", "Booking", "Decision", "Failure", "HostShare", "Job", "Keeping", "Ledger",
    "PassOutcome", "RecoveryRules", "RetryDecision", "Rules", "Running", "Slot", "Speeds", "UsageAccounts", "Waiting",
    "after_failure", "by_slot", "claimed", "decide", "fair_order", "faded", "held", "part_of_gpu", "place",
    "policies",
]  # fmt: skip
