"""Estimate a script that trains on "cuda", as it stands, in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ullage.allocator import AllocatorConfig
from ullage.errors import InvalidValue, ScriptFailed
from ullage.estimation.result import Estimate
from ullage.estimation.scripts.child import GRACE, JOURNAL, Job
from ullage.estimation.scripts.failures import is_launcher_missing, message
from ullage.estimation.scripts.files import put_back
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu

DEFAULT_TIMEOUT = 300.0  # seconds
TAIL = 20  # lines of the script's output that are shown when it fails
_LAUNCHER = {  # what `torchrun --nproc-per-node 1` sets
    "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


def estimate_script(
    path: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    module: bool = False,
    gpu: str | GPU = "H200",
    steps: int | None = 3,
    timeout: float = DEFAULT_TIMEOUT,
    config: AllocatorConfig | None = None,
    trace_file: str | os.PathLike[str] | None = None,
    show_output: bool = False,
) -> Estimate:
    """How much memory a script will take on `gpu`, found without a GPU.

    The script runs as `python path args...` would (`python -m path args...` with `module`), in this folder and in a
    process of its own, on a virtual GPU. It is followed until its training has settled, at least `steps` optimizer
    steps, and a little further for validation and checkpoints; then it is stopped. `steps=None` lets it run to its end.
    Its output is kept apart: shown on standard error with `show_output`, and its last lines when it fails. If it runs
    out of memory, it is run once more on a card without limit to say how much it would need.

    >>> estimate_script("train.py", ["--batch-size", "64"], gpu="A100-40GB").fits       # doctest: +SKIP
    True

    Not covered: several GPUs, CUDA graphs, Triton and other custom kernels (`ScriptFailed` says so).
    """
    shown = f"-m {path}" if module else str(path)
    _check(path, module, steps, timeout)
    job = Job(
        path=str(path),
        args=[str(value) for value in args],
        module=module,
        gpu=find_gpu(gpu),
        steps=steps,
        timeout=timeout,
        limited=True,
        answer="",
        config=config,
        trace_file=None if trace_file is None else os.path.abspath(trace_file),
    )
    notes: list[str] = []
    environment = dict(os.environ)
    answer = _run(job, environment, show_output)
    if is_launcher_missing(answer):
        environment |= _LAUNCHER
        notes.append("the script wants to be started by torchrun: it was given what torchrun gives to a single process")
        answer = _run(job, environment, show_output)
    out_of_memory = answer.get("out_of_memory") if answer["status"] == "failed" else None
    if out_of_memory is not None:
        notes.append("ran out of memory; the figures are those of a card without limit")
        answer = _run(dataclasses.replace(job, limited=False), environment, show_output)
    if answer["status"] == "failed":
        raise ScriptFailed(message(answer, shown, timeout), answer["output"])
    return _estimate(answer["estimate"], notes, out_of_memory, shown)


def _estimate(values: dict[str, Any], notes: list[str], out_of_memory: str | None, shown: str) -> Estimate:
    values |= {"notes": notes + values["notes"], "source": shown}
    if out_of_memory is not None:
        values |= {"out_of_memory": out_of_memory, "fits": False}
    return Estimate.from_dict(values)


def _check(path: str | os.PathLike[str], module: bool, steps: int | None, timeout: float) -> None:
    if steps is not None and steps < 1:
        raise InvalidValue(f"needed at least one step to follow; found {steps}")
    if not timeout > 0:
        raise InvalidValue(f"needed a time limit above zero seconds; found {timeout}")
    if module:
        _check_module(str(path))
        return
    file = Path(path)
    if file.is_dir():
        if not (file / "__main__.py").is_file():
            found = ", ".join(sorted(child.name for child in file.glob("*.py"))[:8])
            raise InvalidValue(f"needed a script; {path} is a folder" + (f" (in it: {found})" if found else ""))
    elif not file.is_file():
        folder = file.parent if file.parent.is_dir() else Path()
        near = ", ".join(sorted(child.name for child in folder.glob("*.py"))[:8])
        raise InvalidValue(f"needed a script; there is no file {path}" + (f" (in {folder}: {near})" if near else ""))


def _check_module(name: str) -> None:
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        found = None
    finally:
        sys.path.pop(0)
    if found is None:
        raise InvalidValue(f"needed a module that `python -m {name}` would run; found none of that name from here")


def _run(job: Job, environment: dict[str, str], show_output: bool) -> dict[str, Any]:
    """Run the child process and read its answer, with the end of the script's output."""
    with tempfile.TemporaryDirectory(prefix="ullage-") as folder:
        answer, output, request = Path(folder, "answer.json"), Path(folder, "output"), Path(folder, "job")
        request.write_bytes(pickle.dumps(dataclasses.replace(job, answer=str(answer))))
        command = [sys.executable, "-P", "-m", "ullage.estimation.scripts.child", str(request)]
        with output.open("wb") as sink:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=_environment(environment),
                start_new_session=True,
            )
        try:
            _wait(process, output, job.timeout + GRACE + 30, show_output)
        finally:
            _end_all(process)
            put_back(answer.with_name(JOURNAL))
        if answer.is_file():
            found: dict[str, Any] = json.loads(answer.read_text())
        else:
            found = {"status": "failed", **_died(process.returncode)}
        found["output"] = _tail(output)
        return found


def _environment(environment: dict[str, str]) -> dict[str, str]:
    """Ullage is found as it is here; nothing is kept back in buffers; trackers on the network stay out of it."""
    home = str(Path(__file__).parents[3])
    paths = [home, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    kept = {"PYTHONUNBUFFERED": "1", "WANDB_MODE": "disabled", "COMET_MODE": "disabled"}
    return kept | environment | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _wait(process: subprocess.Popen[bytes], output: Path, seconds: float, show_output: bool) -> None:
    deadline = time.monotonic() + seconds
    with output.open("rb") as source:
        while process.poll() is None and time.monotonic() < deadline:
            _show(source, show_output)
            time.sleep(0.02)
        _show(source, show_output)


def _show(source: Any, show_output: bool) -> None:
    if show_output and (text := source.read()):
        sys.stderr.write(text.decode(errors="replace"))
        sys.stderr.flush()


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """The script's own processes (workers of its DataLoaders) end with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _died(code: int | None) -> dict[str, Any]:
    if code is not None and code < 0:
        how = f"was ended by {signal.Signals(-code).name}" + (" (was memory short?)" if code == -signal.SIGKILL else "")
    else:
        how = f"left without a word, with exit code {code}"
    return {"kind": "died", "how": how}


def _tail(output: Path) -> str:
    lines = output.read_bytes().decode(errors="replace").replace("\r", "\n").splitlines()
    return "\n".join([line for line in lines if line.strip()][-TAIL:])
