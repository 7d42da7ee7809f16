"""Estimates of batch scripts where they are submitted, without a GPU and with the user's rights. An answer is cached
in the user's folder until one of its inputs changes."""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ullage
from ullage.estimation.jobs.child import estimate_here, script_request
from ullage.home import home
from ullage.manager.slurm.batch_script import BatchTraining
from ullage.performance.result import Utilization
from ullage.sandbox.environment import environment
from ullage.sandbox.guard import Sandbox
from ullage.sandbox.limits import Limits
from ullage.sandbox.parent import Outcome, run
from ullage.sandbox.recording import Reads
from ullage.units import GIB

TIMEOUT = 300.0  # seconds for one script
_GRACE = 40.0  # seconds more until its process is ended
_ENTRY = f"{estimate_here.__module__}:{estimate_here.__name__}"
_ALONE = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # no GPU, and one core of a login node
_NO_GPU = "never used the GPU"


@dataclass(frozen=True)
class ScriptAnswer:
    """What is known of one script on one GPU: `upper` in bytes, or why it is not known."""

    upper: int | None
    fits: bool = True
    failure: str | None = None
    utilization: Utilization | None = None
    seconds: float = 0.0
    kept: bool = False

    @property
    def uses_no_gpu(self) -> bool:
        """Whether it ran to its end and made nothing on a GPU."""
        return self.failure is not None and _NO_GPU in self.failure


def estimate_training(
    training: BatchTraining, gpu: str, network: bool = False, timeout: float = TIMEOUT
) -> ScriptAnswer:
    """How much memory a script of a batch script takes on a GPU."""
    variables = {**environment(training.environment), **_ALONE}
    file = _kept_file(training, gpu)
    cached = _cached(file, variables)
    if cached is not None:
        return _answer(cached, gpu, 0.0, kept=True)
    began = time.monotonic()
    request = script_request(training.command, training.ranks, gpu, training.folder, timeout, network)
    try:
        outcome = run(
            _ENTRY,
            request,
            limits=Limits(seconds=timeout + _GRACE, processes=512, written=4 * GIB),
            env=variables,
            cwd=training.folder,
            private=Sandbox(network=network),
            record=True,
        )
    except OSError as error:
        return ScriptAnswer(None, failure=f"it cannot run in {training.folder}: {error.strerror}")
    if outcome.answer is None:
        reason = outcome.failure if outcome.reason == "error" else f"it {outcome.failure}"
        return ScriptAnswer(None, failure=reason, seconds=time.monotonic() - began)
    _cache(file, outcome)
    return _answer(outcome.answer, gpu, time.monotonic() - began)


def _answer(data: dict[str, Any], gpu: str, seconds: float, kept: bool = False) -> ScriptAnswer:
    if "failed" in data:
        return ScriptAnswer(None, failure=str(data["failed"]), seconds=seconds, kept=kept)
    known = data.get("utilization", {}).get(gpu)
    utilization = None if known is None else Utilization.from_dict(known)
    return ScriptAnswer(data["upper"], data["fits"], None, utilization, seconds, kept)


def _kept_file(training: BatchTraining, gpu: str) -> Path:
    command, ranks, path = training.command, dict(training.ranks), training.environment.get("PATH")
    known = [
        ullage.__version__,
        os.getuid(),
        command,
        ranks,
        training.folder,
        path,
        gpu,
        os.environ.get("ULLAGE_PYTORCH"),
    ]
    return home() / "slurm" / "answers" / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()}.json"


def _cached(file: Path, variables: dict[str, str]) -> dict[str, Any] | None:
    """The answer in a file, if everything that it follows from is as it was."""
    try:
        data = json.loads(file.read_bytes())
        reads = Reads.from_dict(data["reads"])
        answer: dict[str, Any] = data["answer"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return answer if reads.same_variables(variables) and reads.same_files() else None


def _cache(file: Path, outcome: Outcome) -> None:
    """Keep an answer for the next time. Where that is not possible it is asked again."""
    reads = outcome.reads
    if reads is None or reads.programs or not reads.whole or not reads.files:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".new", delete=False) as new:
            json.dump({"answer": outcome.answer, "reads": reads.to_dict()}, new)
        os.replace(new.name, file)
