"""Uncertainty of a run: guessed workspaces, assumptions, and parts left out.

The kernel that a library selects is not always known, and a larger workspace can move everything after it. So the
requests of a run can be repeated on a separate allocator, with each uncertain one at its largest size. The driver's
placement of segments is imitated, too, and may differ: rings of large buffers, such as those of sharded weights, can
need a whole buffer more. So with other ranks or guesses, the requests are also repeated with segments at rising
addresses.

Assumptions and parts left out widen the bound by their kind, `NOTE_MEANINGS`: by nothing if the maximum was assumed, or
numbers were only printed; by a twentieth of the reserved memory if kernels run that were not measured, or nothing shows
how much more there can be; by the activations for CUDA graphs, whose pool no other code can use, and for sparse
products, whose many sizes leave more memory cached; by the cached memory if batches vary in size, since the number of
batches in a long run that exceed all before them has a spread (three standard deviations) about as large as itself; and
by the buffers of other connections if NCCL may use them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ullage.text import AFTER_THE_TIME
from ullage.virtual.cudnn.formulas import ConvolutionProblem, Workspace

SPREAD_SHARE = 40  # a fortieth of the reserved memory: the spread of runs with guessed kernels or autocast
SURPRISES = 2  # wrong guesses that a bound allows for, each of the size of the least certain one

UNMEASURED_SHARE = 20  # a twentieth: the allowance for kernels that were not measured

ASSUMED, LEFT_OUT = "assumed", "left_out"
NOTHING, A_TWENTIETH, THE_ACTIVATIONS, OTHER_CONNECTIONS, WHAT_IS_CACHED = range(5)  # additions to the bound


class NoteMeaning(NamedTuple):
    group: str  # ASSUMED or LEFT_OUT
    what: str
    covered: bool  # whether `upper` still holds
    adds: int = A_TWENTIETH  # to `upper`: one of the constants above


# By the kind that `GPUState.note` gets. Notes of other kinds say nothing about memory.
NOTE_MEANINGS = {
    "shapes": NoteMeaning(ASSUMED, "data-dependent shapes at their maximum", True, NOTHING),
    "products": NoteMeaning(ASSUMED, "products of sparse matrices as full ones", False, THE_ACTIVATIONS),
    "unbounded shapes": NoteMeaning(ASSUMED, "data-dependent shapes without a known maximum", False),
    "turns": NoteMeaning(ASSUMED, "choices by scores (topk) or drawn numbers as evenly spread", False),
    "nested": NoteMeaning(ASSUMED, "padding in full", True, NOTHING),
    "values": NoteMeaning(ASSUMED, "values that the code read", False),
    "readings": NoteMeaning(ASSUMED, "numbers that the code printed or compared", False, NOTHING),
    "operators": NoteMeaning(ASSUMED, "operators that take no more than their outputs", False),
    "triton": NoteMeaning(ASSUMED, "that Triton kernels take no memory of their own", True, NOTHING),
    "recurrent": NoteMeaning(ASSUMED, "memory of cuDNN's recurrent networks by fitted formulas", False),
    "solvers": NoteMeaning(ASSUMED, "workspaces of cuSOLVER by fitted formulas", False),
    "streams": NoteMeaning(ASSUMED, "the timing of side streams", True, NOTHING),
    "repetition": NoteMeaning(ASSUMED, "that later steps take no more", False, WHAT_IS_CACHED),
    "version": NoteMeaning(ASSUMED, "the kernels of PyTorch 2.11", False),
    "compile": NoteMeaning(LEFT_OUT, "torch.compile (the eager code ran)", False),
    "compiled": NoteMeaning(ASSUMED, "what torch.compile times and pads on the card", True),
    "autotuning": NoteMeaning(ASSUMED, "which kernels max-autotune takes", False),
    "compile failed": NoteMeaning(LEFT_OUT, "parts of torch.compile that failed (the eager code ran)", False),
    "graphs": NoteMeaning(LEFT_OUT, "CUDA graphs of torch.compile", False, THE_ACTIVATIONS),
    "timing": NoteMeaning(LEFT_OUT, "CUDA graphs by which Triton times kernels", False),
    "lookups": NoteMeaning(LEFT_OUT, "kernels of packages that are not installed here", False),
    "scripting": NoteMeaning(LEFT_OUT, "torch.jit.script and torch.jit.trace (the Python code ran)", False),
    "distributed": NoteMeaning(ASSUMED, "memory of NCCL as on an H200", True, NOTHING),
    "connections": NoteMeaning(ASSUMED, "memory of NCCL by the sizes in its source", False, OTHER_CONNECTIONS),
    "ranks": NoteMeaning(ASSUMED, "that the other ranks are like this one", True),
    "cudnn": NoteMeaning(ASSUMED, "which plans cuDNN's switches leave", False),
    "trials": NoteMeaning(ASSUMED, "which plans cudnn.benchmark tries and keeps", True),
    "allocator": NoteMeaning(LEFT_OUT, "allocator settings", False),
    "settings": NoteMeaning(LEFT_OUT, "allocator settings", False),
    "growth": NoteMeaning(LEFT_OUT, "growth in later iterations", False),
    "failed": NoteMeaning(LEFT_OUT, "what comes after the script failed", False),
    "after": NoteMeaning(LEFT_OUT, "what comes after training", False),
    "lengths": NoteMeaning(ASSUMED, "that no item is larger than those looked at", False, WHAT_IS_CACHED),
    "sizes": NoteMeaning(ASSUMED, "that batches of other sizes fit into what is cached", False, WHAT_IS_CACHED),
    "interrupted": NoteMeaning(LEFT_OUT, "what comes after the process ended", False),
    "timeout": NoteMeaning(LEFT_OUT, AFTER_THE_TIME, False),
}


class Uncertainty:
    def __init__(self) -> None:
        self.autocast_used = False  # its casts are freed in the order of their addresses: two runs differ
        self.convolutions: dict[ConvolutionProblem, Workspace] = {}  # cuDNN's, measured or guessed
        self._seen: set[int] = set()

    def add_convolutions(self, workspaces: dict[ConvolutionProblem, Workspace]) -> None:
        """Add the workspaces of a call; plans are cached for the whole process, so each counts once."""
        if id(workspaces) not in self._seen:
            self._seen.add(id(workspaces))
            self.convolutions.update(workspaces)

    def guesses(self) -> list[Workspace]:
        return [workspace for workspace in list(self.convolutions.values()) if workspace.guessed]

    def guessed(self) -> dict[str, int]:
        """Return how many of the convolution workspaces were guessed, with bytes; see `Estimate.guessed`."""
        guesses = self.guesses()
        return {
            "workspaces": len(guesses),
            "of": len(self.convolutions),
            "bytes": sum(guess.size for guess in guesses),
            "of_bytes": sum(workspace.size for workspace in list(self.convolutions.values())),
        }

    @property
    def largest_doubt(self) -> int:
        """The largest difference in bytes between a guess and its likely alternative."""
        return max((guess.larger - guess.size for guess in self.guesses()), default=0)

    @property
    def surprise(self) -> int:
        """The possible error in bytes of the least certain guess beyond that."""
        return max((guess.surprise for guess in self.guesses()), default=0)

    def spread(self, reserved: int) -> int:
        if not self.autocast_used and not self.guesses():
            return 0
        return max(reserved // SPREAD_SHARE, SURPRISES * self.surprise)


def meanings_of(
    notes: Mapping[tuple[str, str], int],
    group: str,
    reserved: int,
    activations: int,
    connections: int = 0,
    cached: int = 0,
) -> list[dict[str, Any]]:
    """Return assumptions or parts left out, by the notes of a run (kind and text, with a count).

    Each entry says `what`, how often (`count`), whether `upper` still holds (`covered`), and how many bytes `upper`
    adds for it (`adds`), by the bytes that are `reserved`, those of `activations`, those of additional NCCL
    `connections`, and those that are `cached` and not in use.
    """
    added = {
        NOTHING: 0,
        A_TWENTIETH: reserved // UNMEASURED_SHARE,
        THE_ACTIVATIONS: activations,
        OTHER_CONNECTIONS: connections,
        WHAT_IS_CACHED: max(cached, reserved // UNMEASURED_SHARE),
    }
    meanings: dict[str, dict[str, Any]] = {}
    for (kind, _), count in notes.items():
        meaning = NOTE_MEANINGS.get(kind)
        if meaning is not None and meaning.group == group:
            entry = {"what": meaning.what, "count": 0, "covered": meaning.covered, "adds": added[meaning.adds]}
            meanings.setdefault(meaning.what, entry)["count"] += count
    return list(meanings.values())
