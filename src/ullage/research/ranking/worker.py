"""One estimate in a process of its own: a crash, a hang or a greedy estimator is a recorded failure and no more.

The processes are forked from a server that has PyTorch and the packages of models loaded, so each starts clean and at
once. The time of an estimate is taken inside: everything from the question to the answer (building the model, real
training steps on the CPU, the replay), but not the start of Python and the imports that all share.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ullage.estimation.result import Estimate

Ask = Callable[[str, dict[str, Any], str], "Estimate | str"]  # estimator, row, GPU; a text says why it is not supported

PRELOAD = ("ullage.research.ranking.worker", "ullage.workloads.sources.build", "ullage.workloads.training")
PACKAGES = ("torchvision", "timm", "transformers")
MEMORY_SHARE = 0.8  # of the machine's memory that one estimate may take
LONGEST_REASON = 300


@dataclass(frozen=True, kw_only=True)
class Record:
    """What an estimator answered about a run, as a line of a results file; sizes are bytes.

    Exactly one of `figure`, `unsupported` and `failed` is set.

    >>> Record(estimator="horus", run="r1", gpu="H200", seconds=0.1, unsupported="no summary").given
    False
    """

    estimator: str
    run: str
    gpu: str
    seconds: float | None = None
    cpu_seconds: float | None = None
    figure: int | None = None
    kind: str | None = None
    allocated: int | None = None
    reserved: int | None = None
    process: int | None = None
    upper: int | None = None
    context: int | None = None
    unsupported: str | None = None
    failed: str | None = None
    notes: tuple[str, ...] = ()
    code: str | None = None  # which version of this package answered

    @property
    def given(self) -> bool:
        """Whether there is an estimate."""
        return self.figure is not None

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values, without what is not known."""
        return {name: value for name, value in asdict(self).items() if value not in (None, ())}


def ask_apart(ask: Ask, estimator: str, run: str, row: dict[str, Any], gpu: str, limit: float) -> Record:
    """The answer of an estimator, from a process that is ended after `limit` seconds.

    `ask` is a function of a module, so that the process can import it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "ullage.research.ranking.packages"])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(send, ask, estimator, row, gpu), daemon=True)
    begin = time.perf_counter()
    process.start()
    send.close()
    try:
        values = receive.recv() if receive.poll(limit) else {"failed": f"took longer than {limit:.0f} s"}
    except EOFError:
        process.join(5)
        values = {"failed": _ending(process.exitcode)}
    finally:
        _end(process)
        receive.close()
    values.setdefault("seconds", time.perf_counter() - begin)
    return Record(estimator=estimator, run=run, gpu=gpu, **values)


def _end(process: Any) -> None:
    process.join(0.2)
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # with what it started itself
        process.kill()  # where it had not come to be a group of its own
        process.join()
    process.close()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was ended by signal {-code}" + (" (out of host memory?)" if code == -9 else "")
    return f"the process ended with exit code {code} and no answer"


def _answer(send: Connection, ask: Ask, estimator: str, row: dict[str, Any], gpu: str) -> None:
    """In the process: ask, and send what came as plain values."""
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    _limit_memory()
    with open(os.devnull, "w") as nowhere:  # what estimators print is not the answer
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
        begin, worked = time.perf_counter(), _cpu_time()
        try:
            found = ask(estimator, row, gpu)
            values: dict[str, Any] = {"unsupported": found} if isinstance(found, str) else figures(found)
        except MemoryError:
            values = {"failed": "took more memory of this machine than it may"}
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            values = {"failed": f"{type(error).__name__}: {text[0]}"[:LONGEST_REASON]}
        values |= {"seconds": time.perf_counter() - begin, "cpu_seconds": _cpu_time() - worked}
        send.send(values)


def figures(answer: Estimate) -> dict[str, Any]:
    """What a record keeps of an estimate."""
    return {
        "figure": answer.figure,
        "kind": answer.figure_kind,
        "allocated": answer.peak_allocated,
        "reserved": answer.peak_reserved,
        "process": answer.process_memory,
        "upper": answer.upper,
        "context": answer.breakdown.get("context"),
        "notes": tuple(answer.notes),
    }


def _end_with_parent() -> None:
    """Wait until the asking process is gone, however it ended, and end this one and what it started."""
    asking = multiprocessing.parent_process()
    if asking is not None:
        wait([asking.sentinel])
        os.killpg(0, signal.SIGKILL)


def _cpu_time() -> float:
    """Processor time of this process and of those that it started and that have ended."""
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)


def _limit_memory() -> None:
    """So that a model too large for this machine fails by itself instead of taking the machine with it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = mapped + int(MEMORY_SHARE * total)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def load_packages() -> None:
    """Import the packages of models that are there, as the processes' server does once."""
    from ullage.virtual.torch_api.torchvision import make_torchvision_importable

    make_torchvision_importable()
    for name in PACKAGES:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
