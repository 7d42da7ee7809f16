"""Where a job goes: snapshots, the promise ledger, policies. Pure: no I/O, no clock, no PyTorch."""

from ullage.placement.deciding import decide
from ullage.placement.fairness import fair_order, recent_usage
from ullage.placement.ledger import Ledger
from ullage.placement.outcome import Decision, Outcome, Waiting
from ullage.placement.policies import policies
from ullage.placement.rules import Rules, Slowdown
from ullage.placement.snapshot import Activity, Job, Running, Slot

__all__ = [
    "Activity", "Decision", "Job", "Ledger", "Outcome", "Rules", "Running", "Slot", "Slowdown", "Waiting", "decide",
    "fair_order", "policies", "recent_usage",
]  # fmt: skip
