"""The order of collectives in a step: the calls that each can overlap, and those that wait for it.

Each collective records how many calls earlier it can begin (`lead`), and each wait how many collectives ago its
collective began (`back`), as far as streams and events allow. Both count from their place, so that steps stay equal.
`performance/network.py` computes their times.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from ullage.virtual.watching.step_calls import OperatorCalls

_REMEMBERED = 512


class Reached(NamedTuple):
    """The progress of a stream: it is `after` this many calls of the default stream, and after collectives by group."""

    after: int = 0
    seen: tuple[tuple[str, int], ...] = ()

    def joined(self, other: "Reached") -> "Reached":
        seen = dict(self.seen)
        for group, number in other.seen:
            seen[group] = max(number, seen.get(group, 0))
        return Reached(max(self.after, other.after), tuple(seen.items()))


class Communication:
    """The collectives of one virtual GPU among several ranks."""

    def __init__(self, calls: OperatorCalls) -> None:
        self.count = 0  # of collectives that were begun
        self._calls = calls
        self._groups: dict[str, int] = {}
        self._group_of: OrderedDict[int, str] = OrderedDict()  # of the last collectives
        self._streams: dict[int, Reached] = {}
        self._writing: OrderedDict[int, int] = OrderedDict()  # the collective that wrote an allocation last

    def begin(self, name: str, group: str, stream: int, **numbers: int) -> int:
        """Begin a collective on a stream; return its number. `numbers` are those of `network.Collective`."""
        self.count += 1
        _remember(self._group_of, self.count, group)
        here = self._calls.position
        begins = here if stream == 0 else max(self.reached(stream).after, self._calls.step_begins)
        place = self._groups.setdefault(group, len(self._groups))
        self._calls.add_values(f"collective.{name}", group=place, lead=here - begins, **numbers)
        return self.count

    def remember(self, spans: Iterable[Any], number: int) -> None:
        """Record the allocations that a collective writes."""
        for span in spans:
            if span is not None:
                _remember(self._writing, span.index, number)

    def wait_for_tensors(self, stream: int, spans: Iterable[Any]) -> None:
        """Order the next work of a stream after the collectives that write these allocations."""
        for number in {self._writing.get(span.index, 0) for span in spans if span is not None}:
            self.wait_for(stream, number)

    def wait_for(self, stream: int, number: int) -> None:
        """Order the next work of a stream after a collective."""
        group = self._group_of.get(number)
        if group is not None:
            self.wait(stream, Reached(0, ((group, number),)))

    def reached(self, stream: int) -> Reached:
        """Return the current progress of a stream."""
        progress = self._streams.get(stream, Reached())
        return progress._replace(after=self._calls.position) if stream == 0 else progress

    def wait(self, stream: int, until: Reached) -> None:
        """Order the next work of a stream after a point reached elsewhere."""
        before = self._streams.get(stream, Reached())
        after = self._streams[stream] = before.joined(until)
        if stream == 0 and after.seen != before.seen:
            known = dict(before.seen)
            for group, number in after.seen:
                if number > known.get(group, 0):
                    self._calls.add_values("collective.wait", back=self.count - number)

    def host_waits(self, stream: int | None) -> None:
        """Let the host wait for a stream, or for all; its next calls begin after that."""
        for number in list(self._streams) if stream is None else [stream]:
            self.wait(0, self.reached(number))


def _remember(where: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    where[key] = value
    where.move_to_end(key)
    if len(where) > _REMEMBERED:
        where.popitem(last=False)
