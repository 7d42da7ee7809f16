"""GPUs that operators reserve for users or groups for a time, and whose jobs may use them."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable, Iterable, Sequence

from ullage.errors import InvalidValue
from ullage.manager.placement import Booking
from ullage.manager.storage.records import JobRecord, Reservation
from ullage.units import format_moment

LONGEST = 366 * 86400.0  # seconds


def booking_of(reservation: Reservation) -> Booking:
    """The reservation as placement sees it."""
    who = " and ".join((*reservation.users, *(f"group {name}" for name in reservation.groups)))
    span = f"from {format_moment(reservation.begin)} until {format_moment(reservation.end)}"
    name = f" ({reservation.name})" if reservation.name else ""
    return Booking(reservation.id, reservation.begin, reservation.end, f"is reserved for {who} {span}{name}")


def usable_by(job: JobRecord, reservations: Sequence[Reservation]) -> frozenset[int]:
    """The reservations that a job may use: those of its user, or of a group that its user is in."""
    found = {each.id for each in reservations if job.user in each.users}
    left = [each for each in reservations if each.groups and each.id not in found]
    if left:
        mine = _groups(job.user, job.gid)
        found |= {each.id for each in left if mine & set(each.groups)}
    return frozenset(found)


def check_reservation(new: Reservation, others: Iterable[Reservation], now: float) -> None:
    """Refuse one for nobody, for people whom the system does not know, in the past, or over another one."""
    if not new.users and not new.groups:
        raise InvalidValue("needed a user or a group to reserve for; found neither")
    for name in new.users:
        _known("user", name, pwd.getpwnam)
    for name in new.groups:
        _known("group", name, grp.getgrnam)
    if new.end <= now or not 0 < new.end - new.begin <= LONGEST:
        found = f"{format_moment(new.begin)} to {format_moment(new.end)}"
        raise InvalidValue(f"needed a time that is not over, of at most {LONGEST / 86400:.0f} days; found {found}")
    for other in others:
        if set(other.gpus) & set(new.gpus) and other.begin < new.end and new.begin < other.end:
            raise InvalidValue(
                f"a GPU of these {booking_of(other).text} already; 'ullage unreserve {other.id}' takes that back"
            )


def _known(what: str, name: str, find: Callable[[str], object]) -> None:
    try:
        find(name)
    except KeyError:
        raise InvalidValue(f"needed a {what} of this system; found no {name[:80]!r}") from None


def _groups(user: str, gid: int) -> set[str]:
    found = set()
    for number in os.getgrouplist(user, gid):
        try:
            found.add(grp.getgrgid(number).gr_name)
        except KeyError:
            continue
    return found
