"""Asks cuDNN about many convolutions: `ullage measure cudnn`.

The problems come from a file, or from a script that is followed on a virtual GPU. A line of the result is JSON:
`problem` (the fields of a `ConvolutionProblem`), `gpu`, `cudnn` (its version), and `candidates`, in the order in
which PyTorch tries them, each with `engine`, `notes` and `workspace`. If cuDNN declined, `declined` replaces them.
Problems that the result already has are skipped.
"""

import json
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from ullage.errors import InvalidValue, UnknownName
from ullage.estimation.scripts.parent import convolutions_of_script
from ullage.hardware import gpu
from ullage.hardware.catalogue import ARCHITECTURE_CARDS
from ullage.jobs.model import read_rows, rows_so_far
from ullage.virtual.cudnn.backend import Cudnn, CudnnError
from ullage.virtual.cudnn.formulas import ConvolutionProblem

_AT_ONCE = 32  # problems that a process gets at once


def listed_problems(path: Path) -> list[ConvolutionProblem]:
    """Return the problems of a file, in its order: a line of JSON each, under `problem`."""
    try:
        return list(dict.fromkeys(ConvolutionProblem.of(row["problem"]) for row in read_rows(path)))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValue(f"{path} must be a list of convolutions: {error}") from None


def problems_of_script(path: Path, args: Sequence[str]) -> list[ConvolutionProblem]:
    """Return the convolutions of a training script, by following it as `estimate_script` does."""
    return [ConvolutionProblem.of(values) for values in convolutions_of_script(path, args)]


def asked_before(path: Path) -> set[ConvolutionProblem]:
    return {ConvolutionProblem.of(row["problem"]) for row in rows_so_far(path) if "problem" in row}


_own_cudnn: list[Cudnn] = []


def _open(description: str | None) -> None:
    torch.set_num_threads(1)
    _own_cudnn.append(Cudnn(description))


def _ask(problems: Sequence[ConvolutionProblem]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for problem in problems:
        try:
            rows.append({"problem": problem, "candidates": _own_cudnn[0].candidates(problem)})
        except CudnnError as error:
            rows.append({"problem": problem, "declined": str(error)})
    return rows


def architectures(text: str) -> list[str]:
    """Return the requested architectures: "all", or names separated by commas."""
    names = list(ARCHITECTURE_CARDS) if text == "all" else text.split(",")
    for name in names:
        if name not in ARCHITECTURE_CARDS:
            raise UnknownName("architecture", name, list(ARCHITECTURE_CARDS))
    return names


def described(own: Mapping[str, Any], architecture: str) -> str:
    """Return the description of a card of this architecture, in cuDNN's JSON, made from that of this machine's card.
    Of its fields, only the architecture changed cuDNN's answers."""
    card = gpu(ARCHITECTURE_CARDS[architecture])
    major, minor = card.told_capability
    known = {
        "deviceVer": major * 100 + minor * 10,
        "deviceName": card.device_name,
        "multiProcessorCount": card.sms,
        "totalGlobalMem": card.usable,
        "maxThreadsPerSM": card.max_threads_per_sm,
    }
    return json.dumps({**own, **{name: value for name, value in known.items() if name in own}})


def ask(
    problems: Iterable[ConvolutionProblem], workers: int = 4, description: str | None = None
) -> Iterator[dict[str, Any]]:
    """Ask cuDNN about problems, in several processes; yield a row for each, in their order.

    `description` describes another GPU, in cuDNN's JSON. For some GPUs that cuDNN does not know (9.19: sm_100), it
    ends the process that asks: that raises `CudnnError`.
    """
    cudnn = Cudnn(description)
    about = {
        "gpu": json.loads(description)["deviceName"] if description else torch.cuda.get_device_name(),
        "cudnn": cudnn.version,
    }
    waiting = list(problems)
    chunks = [waiting[start : start + _AT_ONCE] for start in range(0, len(waiting), _AT_ONCE)]
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_open, initargs=(description,)) as pool:
            for rows in pool.map(_ask, chunks):
                for row in rows:
                    yield about | row
    except BrokenProcessPool:
        raise CudnnError(f"cuDNN {cudnn.version} ended the process that asked about {about['gpu']}") from None
