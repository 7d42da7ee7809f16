"""Drains: GPUs that operators close to new jobs, at once or for a time, except for the jobs of some users."""

import grp
import os
import pwd
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ullage.errors import InvalidValue
from ullage.jobs.schedules import LAST_MOMENT
from ullage.manager.core.context import ManagerContext
from ullage.manager.storage.records import Drain, JobRecord
from ullage.text import plain
from ullage.units import format_moment

LONGEST = 366 * 86400.0  # seconds


def usable_by(job: JobRecord, drains: Sequence[Drain]) -> frozenset[int]:
    usable = {each.id for each in drains if job.user in each.users}
    left = [each for each in drains if each.groups and each.id not in usable]
    if left:
        mine = _groups(job.user, job.gid)
        usable |= {each.id for each in left if mine & set(each.groups)}
    return frozenset(usable)


class Drains:
    """The drains of one daemon. The caller must be an operator."""

    def __init__(self, context: ManagerContext) -> None:
        self._context, self._store = context, context.store

    def drain(
        self, gpu: str | int, reason: str, begin: float | None, until: float | None, allow: list[str]
    ) -> dict[str, Any]:
        """Drain a GPU; a drain without exceptions or end replaces another such drain."""
        now, device = self._context.clock(), self._context.slot_reader.named(gpu)
        new = Drain(
            id=0,
            gpu=device.id,
            begin=now if begin is None else begin,
            until=until,
            users=tuple(name for name in allow if not name.startswith("@")),
            groups=tuple(name[1:] for name in allow if name.startswith("@")),
            reason=plain(reason)[:200],
        )
        there = [each for each in self._store.history.drains(now) if each.gpu == new.gpu]
        if new.closes(now):
            replaced = [each.id for each in there if each.closes(now)]
        else:
            check_drain(new, [each for each in there if not each.closes(now)], now)
            replaced = []
        self._store.drain(new, replaced, f"{new.gpu} {new.reason if new.is_plain else new.text}".strip())
        self._store.afterwards(self._context.service.wake)
        return {"gpu": device.id, "index": device.index, "drained": new.closes(now), "text": new.text}

    def resume(self, gpu: str | int, later: bool) -> dict[str, Any]:
        """Remove the current drains of a GPU; with `later`, also future ones."""
        now, device = self._context.clock(), self._context.slot_reader.named(gpu)
        there = [each for each in self._store.history.drains(now) if each.gpu == device.id]
        gone = [each for each in there if later or each.begin <= now]
        left = "; ".join(each.text for each in there if each not in gone)
        self._store.resume([each.id for each in gone], device.id)
        self._store.afterwards(self._context.service.wake)
        return {"gpu": device.id, "index": device.index, "drained": False, "text": left}


def check_drain(new: Drain, others: Iterable[Drain], now: float) -> None:
    for name in new.users:
        _known("user", name, pwd.getpwnam)
    for name in new.groups:
        _known("group", name, grp.getgrnam)
    if new.until is not None and (new.until <= now or not 0 < new.until - new.begin <= LONGEST):
        span = f"{format_moment(new.begin)} to {format_moment(new.until)}"
        raise InvalidValue(f"a drain must not be over and must last at most {LONGEST / 86400:.0f} days, got {span}")
    for other in others:
        if other.begin < (new.until or LAST_MOMENT) and new.begin < (other.until or LAST_MOMENT):
            raise InvalidValue(f"this GPU {other.text}; undo that with 'ullage admin resume --all'")


def _known(what: str, name: str, find: Callable[[str], object]) -> None:
    try:
        find(name)
    except KeyError:
        raise InvalidValue(f"this system has no {what} {name[:80]!r}") from None


def _groups(user: str, gid: int) -> set[str]:
    names = set()
    for number in os.getgrouplist(user, gid):
        try:
            names.add(grp.getgrgid(number).gr_name)
        except KeyError:
            continue
    return names
