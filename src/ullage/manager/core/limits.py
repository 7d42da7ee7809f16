"""The limits of each user, the host's cores and memory for all jobs, and each job's promised share of them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ullage.errors import NotAllowed
from ullage.jobs.job_files import JobSpec
from ullage.manager.core.context import ManagerContext
from ullage.manager.identity import Caller, is_operator
from ullage.manager.monitor.host import usable_cores, usable_memory
from ullage.manager.placement import HostShare
from ullage.manager.settings import HostSettings
from ullage.manager.storage.records import JobRecord
from ullage.units import format_bytes


class UserLimits:
    """The limits of `[limits]` in the settings, which do not apply to operators."""

    def __init__(self, context: ManagerContext) -> None:
        self._context, self._limits = context, context.settings.limits

    def check(self, caller: Caller, spec: JobSpec, new: int = 1) -> None:
        """Refuse a job beyond the limits; `new` is the number of jobs that it adds."""
        if caller.operator:
            return
        if spec.priority > self._limits.max_priority:
            raise NotAllowed(
                f"{caller.user} may ask for a priority of at most {self._limits.max_priority}, got {spec.priority}. "
                "Operators may give a higher one (limits.max_priority in the settings)"
            )
        if self._limits.gpus is not None and spec.gpus > self._limits.gpus:
            raise NotAllowed(
                f"the job asks for {spec.gpus} GPUs; {caller.user} may use {self._limits.gpus} at a time "
                "(limits.gpus in the settings)"
            )
        self.check_number(caller, new)
        stored, size = self._context.store.bytes_of(caller.uid), len(spec.model_dump_json())
        if stored + size > self._limits.stored:
            raise NotAllowed(
                f"{caller.user}'s jobs that wait or run have {format_bytes(stored)} of commands and variables; this "
                f"one has {format_bytes(size)}, and {format_bytes(self._limits.stored)} are the limit (limits.stored "
                "in the settings). --clean-env sends fewer variables"
            )

    def check_number(self, caller: Caller, new: int) -> None:
        mine = self._context.store.number_of(caller.uid)
        if new and not caller.operator and mine + new > self._limits.jobs:
            raise NotAllowed(
                f"{caller.user} has {mine} jobs that wait or run and asks for {new} more; {self._limits.jobs} at a "
                "time are the limit (limits.jobs in the settings)"
            )

    def gpus_held(self) -> Counter[int] | None:
        if self._limits.gpus is None:
            return None
        store, held = self._context.store, Counter[int]()
        for number, attempt in store.attempts.items():
            held[store.job(number).uid] += len(attempt.slots)
        return held

    def why_not(self, job: JobRecord, gpus: int, held: Counter[int] | None) -> str | None:
        """Return why a user's limit of GPUs keeps a job waiting, or `None`."""
        most = self._limits.gpus
        if most is None or held is None:
            return None
        mine = held[job.uid]
        if mine + gpus <= most or is_operator(job.uid, job.user, self._context.settings.access.operators):
            return None
        return f"needs {gpus} GPU{'s' * (gpus > 1)}; {job.user} has {mine} of {most} at a time (limits.gpus)"


def host_of(settings: HostSettings) -> HostShare:
    """Return the cores and host memory of all jobs together. A reserve leaves them at least one core.

    >>> host_of(HostSettings(cores=8, memory="64GiB"))
    HostShare(cores=8, memory=68719476736)
    """
    cores = max(1, usable_cores() - settings.reserve_cores) if settings.cores is None else settings.cores
    memory = max(0, usable_memory() - settings.reserve_memory) if settings.memory is None else settings.memory
    return HostShare(cores, memory)


def share_of(request: Mapping[str, Any], settings: HostSettings) -> HostShare:
    """Return the cores and host memory to promise a job. A job without a GPU gets at least one core."""
    cores, memory = request.get("cores"), request.get("host_memory")
    least = 1 if request["gpus"] == 0 else 0
    return HostShare(
        max(least, settings.default_cores if cores is None else cores),
        settings.default_memory if memory is None else memory,
    )
