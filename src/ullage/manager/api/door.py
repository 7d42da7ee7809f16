"""Limits the number of connections, in all and for each user or address, and closes idle ones to make room."""

import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ullage.manager.identity import Caller


@dataclass(eq=False)
class Guest:
    """A connection: its user or address, and the time since which it is idle; `None` while it waits for an answer."""

    who: Hashable  # a user, or an address
    close: Callable[[], object]
    operator: bool = False
    caller: Caller | None = None  # on the Unix socket, where the kernel says who it is
    idle_since: float | None = 0.0

    def busy(self) -> None:
        self.idle_since = None

    def idle(self) -> None:
        self.idle_since = time.monotonic()


class ConnectionLimit:
    """Admits connections. If there is no room, it closes the longest idle one of the user with most of them.

    A user or address may have at most `each` connections, and the last `reserve` places are for operators.

    >>> door, closed = ConnectionLimit(most=3, each=2, reserve=1), []
    >>> def comes(who, operator=False):
    ...     return door.enter(Guest(who, lambda: closed.append(who), operator))
    >>> [comes(who) for who in ("ann", "ann", "ann", "bob")], closed
    ([True, True, True, True], ['ann', 'ann'])
    >>> comes("root", operator=True), comes("root", operator=True), closed
    (True, True, ['ann', 'ann', 'ann'])
    """

    def __init__(self, most: int, each: int | None = None, reserve: int = 0) -> None:
        self._most, self._each, self._reserve = most, each, reserve
        self._inside: dict[Guest, None] = {}

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, guest: Guest) -> bool:
        """Admit a connection if there is room, or if closing an idle one makes room."""
        guest.idle()
        of_same = [other for other in self._inside if other.who == guest.who]
        if self._each is not None and not guest.operator and len(of_same) >= self._each and not self._close(of_same):
            return False
        room = self._most if guest.operator else self._most - self._reserve
        if len(self._inside) >= room and not self._close(list(self._inside)):
            return False
        self._inside[guest] = None
        return True

    def leave(self, guest: Guest) -> None:
        self._inside.pop(guest, None)

    def _close(self, guests: list[Guest]) -> bool:
        idle = [(guest, guest.idle_since) for guest in guests if guest.idle_since is not None]
        if not idle:
            return False
        number = Counter(guest.who for guest, _ in idle)
        chosen, _ = min(idle, key=lambda each: (each[0].operator, -number[each[0].who], each[1]))
        self.leave(chosen)
        chosen.close()
        return True
