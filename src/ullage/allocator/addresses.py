"""Where cudaMalloc puts segments: a deterministic imitation.

Addresses matter because best fit breaks ties between free blocks of one size by address. The rule was read
off 27,291 segments in 243 histories recorded on one H200 (driver 580.159, PyTorch 2.11): the driver takes
address space in units of 32 MiB, each new piece below the one before; a segment lies at the beginning of its
piece, and what is left behind it serves later segments that fit, newest piece first.

Replaying the requests of those histories with addresses by different rules, in how many do all segments come
out with the recorded sizes in the recorded order, and how far off is peak reserved memory at worst:

    rule                                                  segments equal   worst error
    this one                                              237 of 243       0.5 %
    as this one, what is left served oldest piece first   211              3.3 %
    as this one, best fit among what is left              207              3.3 %
    each segment directly below the last                  209              4.4 %
    each segment directly above the last                  160              17.3 %

Peak reserved memory is equal in the same 237. The others differ where libraries (cuBLAS, cuDNN, kernels as
they load) take addresses too, which no history shows. No history gives segments back, so that the reuse of
addresses is a guess: a piece that is wholly free is forgotten, a new piece takes the highest room it fits.
"""

from __future__ import annotations

from .constants import ADDRESS_UNIT, HIGHEST_ADDRESS
from .rounding import round_up

Span = tuple[int, int]  # where it begins, how long it is


class AddressSpace:
    """Hands out addresses as cudaMalloc would.

    >>> space = AddressSpace(top=2**30)
    >>> [space.place(size * 2**20) // 2**20 for size in (20, 20, 2, 40)]
    [992, 960, 980, 896]
    """

    def __init__(self, top: int = HIGHEST_ADDRESS) -> None:
        self._pieces: dict[int, int] = {}  # where each begins and how long it is
        self._gaps: dict[int, list[Span]] = {}  # the room left in each piece, oldest piece first
        self._holes: list[Span] = [(0, top)]  # room for new pieces, sorted

    def place(self, size: int) -> int:
        """Find an address for a segment.

        >>> AddressSpace(top=2**30).place(2**21) == 2**30 - 2**25
        True
        """
        for piece in reversed(self._gaps):
            gaps = self._gaps[piece]
            for index, (start, length) in enumerate(gaps):
                if length >= size:
                    gaps[index : index + 1] = [(start + size, length - size)] if length > size else []
                    if not gaps:
                        del self._gaps[piece]
                    return start
        return self._new_piece(size)

    def release(self, address: int, size: int) -> None:
        """Take back the addresses of a segment.

        >>> space = AddressSpace(top=2**30); space.release(space.place(2**21), 2**21)
        >>> space.place(2**29) // 2**20
        512
        """
        piece = max(start for start in self._pieces if start <= address)
        gaps = _merged([*self._gaps.get(piece, []), (address, size)])
        if gaps == [(piece, self._pieces[piece])]:
            self._gaps.pop(piece, None)
            self._holes = _merged([*self._holes, (piece, self._pieces.pop(piece))])
        else:
            self._gaps[piece] = gaps

    def _new_piece(self, size: int) -> int:
        total = round_up(size, ADDRESS_UNIT)
        for index in reversed(range(len(self._holes))):
            start, length = self._holes[index]
            if length >= total:
                self._holes[index : index + 1] = [(start, length - total)] if length > total else []
                piece = start + length - total
                self._pieces[piece] = total
                if total > size:
                    self._gaps[piece] = [(piece + size, total - size)]
                return piece
        raise ValueError(f"a segment of {size} bytes needs more addresses than are left")


def _merged(spans: list[Span]) -> list[Span]:
    """Sort spans and join those that touch."""
    result: list[Span] = []
    for start, length in sorted(spans):
        if result and sum(result[-1]) == start:
            result[-1] = (result[-1][0], result[-1][1] + length)
        else:
            result.append((start, length))
    return result
