"""The environment of a job: its submitter's variables, venv or conda environment, GPUs, and Ullage's variables."""

import os
import pwd
import re
from collections.abc import Mapping, Sequence

from ullage.jobs.job_files import JobSpec
from ullage.manager.running.supervisor import CHECKPOINT_EXIT, TOKEN
from ullage.manager.storage.records import AttemptRecord, JobRecord

_PATH = "/usr/local/bin:/usr/bin:/bin"
# The submitter's choice of GPUs and virtual GPUs must not leak into a job.
_DROPPED = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ULLAGE_CARDS", "ULLAGE_CRASH_AT", TOKEN)


def job_environment(job: JobRecord, spec: JobSpec, attempt: AttemptRecord, gpus: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an attempt; `gpus` are the variables for its GPUs."""
    env = base_environment(spec, job.uid)
    env |= {
        "ULLAGE_JOB_ID": str(job.id),
        "ULLAGE_JOB_NAME": job.name,
        "ULLAGE_ATTEMPT_NUMBER": str(attempt.number),
        "ULLAGE_CHECKPOINT_EXIT": str(CHECKPOINT_EXIT),
        TOKEN: attempt.token,
    }
    if attempt.promise is not None:
        env["ULLAGE_PROMISED_BYTES"] = str(attempt.promise)
    if attempt.cores:
        env["ULLAGE_CORES"] = str(attempt.cores)
        env.setdefault("OMP_NUM_THREADS", str(attempt.cores))
    if job.array_id is not None:
        env |= {"ULLAGE_ARRAY_ID": str(job.array_id), "ULLAGE_ARRAY_INDEX": str(job.array_index)}
    return env | dict(gpus)


def estimate_environment(spec: JobSpec, uid: int, name: str, array_index: int | None = None) -> dict[str, str]:
    """Return the environment of a job's estimate. Job numbers are 0, since the answer must not depend on them."""
    env = base_environment(spec, uid)
    env |= {
        "ULLAGE_JOB_ID": "0",
        "ULLAGE_JOB_NAME": name,
        "ULLAGE_ATTEMPT_NUMBER": "1",
        "ULLAGE_CHECKPOINT_EXIT": str(CHECKPOINT_EXIT),
    }
    if array_index is not None:
        env |= {"ULLAGE_ARRAY_ID": "0", "ULLAGE_ARRAY_INDEX": str(array_index)}
    return env


def base_environment(spec: JobSpec, uid: int) -> dict[str, str]:
    """Return the submitter's variables and a minimal environment, with the venv first in PATH. The job's own process
    looks for a conda environment, since the daemon opens no path that a user names."""
    env = least_environment(uid) | {name: value for name, value in spec.env.items() if name not in _DROPPED}
    if spec.venv is not None:
        env |= {"PATH": f"{spec.venv}/bin{os.pathsep}{env['PATH']}", "VIRTUAL_ENV": spec.venv}
        env.pop("PYTHONHOME", None)
    return env


def output_paths(job: JobRecord, spec: JobSpec, attempt: AttemptRecord) -> dict[str, str | None]:
    values = {
        "j": str(job.id),
        "t": str(attempt.number),
        "u": job.user,
        "n": job.name.replace("/", "_"),
        "%": "%",
        "A": str(job.array_id or job.id),
        "a": str(0 if job.array_index is None else job.array_index),
    }

    def filled(path: str | None) -> str | None:
        return None if path is None else re.sub("%(.)", lambda match: values[match[1]], path)

    return {"output": filled(spec.output), "error": filled(spec.error or spec.output)}


def gpu_variables(slots: Sequence[str]) -> dict[str, str]:
    """Return the variables that select GPUs by UUID, which does not depend on the order of devices."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(slots), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def least_environment(uid: int) -> dict[str, str]:
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return {"PATH": _PATH}
    return {"PATH": _PATH, "HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "LANG": "C.UTF-8"}
