"""Choose branches that work: an unknown condition does not lead to an exception.

A script that is estimated is one that runs. If `assert x.isfinite().all()` or `if not ok: raise ...` reads an unknown
flag, one of the two branches can only raise, so the flag has the other value.
"""

import dis
import functools
import os
import sys
from types import CodeType, FrameType

import torch

_OURS = os.path.dirname(os.path.abspath(__file__))  # this folder
_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (_OURS, os.path.abspath(torch.__file__)))
_ASKING = ("CALL", "PRECALL", "COMPARE_OP")  # since Python 3.13 a comparison reads the flag itself
_NOTHING = ("CACHE", "NOT_TAKEN")


MOST_ROUNDS = 40  # of a loop that trains until a number is small; by then its training has settled
MOST_WAITED = 1000  # rounds of a loop that does not train, but waits for a flag

_Place = tuple[CodeType, int]


def working_answer() -> bool | None:
    """Return the flag that code outside PyTorch reads now; `None` if both branches work."""
    place = _place()
    return None if place is None else _answer_at(*place, False)


class AssumedFlags:
    """Answers to flags that depend on assumed numbers.

    Such a flag would never change, so a loop does not begin another round for it. A loop that has trained since it last
    read the flag does, because the first training steps differ from the others.

    An unknown flag is false. If code reads one so often that it can only wait for it, as for accepted samples, it is
    true.
    """

    def __init__(self) -> None:
        self._reads: dict[_Place, tuple[int, int]] = {}  # the training steps at the last read, and the number of reads
        self._waiting: tuple[_Place | None, int, int] = None, 0, 0  # the place, the steps of training, and the rounds

    def waited_for(self, steps: int) -> bool:
        """Return the answer to an unknown flag; `steps` is the number of training steps."""
        place = _place()
        where, since, rounds = self._waiting
        self._waiting = place, steps, rounds + 1 if (where, since) == (place, steps) else 1
        return self._waiting[2] > MOST_WAITED

    def working_answer(self, steps: int) -> bool | None:
        """Return the flag as the function `working_answer` does; `steps` is the number of training steps."""
        place = _place()
        if place is None:
            return None
        before, rounds = self._reads.get(place, (0, 0))
        self._reads[place] = steps, rounds + 1
        return _answer_at(*place, supposed=steps == before or rounds >= MOST_ROUNDS)


def _place() -> _Place | None:
    """Return the current instruction of the code outside PyTorch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _answer_at(code: CodeType, place: int, supposed: bool) -> bool | None:
    following = [line for line in dis.get_instructions(code) if line.offset >= place and line.opname not in _NOTHING]
    while following and (
        following[0].opname == "TO_BOOL" or following[0].offset == place and following[0].opname.startswith(_ASKING)
    ):
        following = following[1:]
    if len(following) < 2 or "JUMP" not in following[0].opname or "_IF_" not in following[0].opname:
        return None
    jump, *straight = following
    if supposed and "BACKWARD" in jump.opname + straight[0].opname:
        return jump.opname.endswith("FALSE") is ("BACKWARD" in jump.opname)
    jumped = [line for line in following if line.offset >= jump.argval]
    on_jump, on_going = _only_raises(jumped), _only_raises(straight)
    if on_jump == on_going or not jump.opname.endswith(("TRUE", "FALSE")):
        return None
    return jump.opname.endswith("TRUE") is on_going


def _only_raises(lines: list[dis.Instruction]) -> bool:
    for line in lines:
        if line.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in line.opname or line.opname.startswith(("RETURN", "STORE", "FOR_ITER", "YIELD")):
            return False
    return False
