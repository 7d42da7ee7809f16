"""What GPUs and hosts do now: readings of NVML, GPM, DCGM, MIG instances, host processes and virtual cards."""

from __future__ import annotations

from ullage.monitor.activity import ActivityBetween, activity_between

__all__ = ["ActivityBetween", "activity_between"]
