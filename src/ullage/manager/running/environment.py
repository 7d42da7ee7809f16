"""The environment that a job finds: the submitter's, its venv or conda environment, its GPUs, and what it may ask."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, Sequence
from pathlib import Path

from ullage.errors import InvalidValue
from ullage.manager.running.supervisor import CHECKPOINT_EXIT, TOKEN
from ullage.manager.storage.records import AttemptRecord, JobRecord
from ullage.workloads.job_files import JobSpec

_PATH = "/usr/local/bin:/usr/bin:/bin"
# The submitter's own view of GPUs and of the virtual ones must not leak into a job.
_DROPPED = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ULLAGE_CARDS", "ULLAGE_CRASH_AT", TOKEN)
_CONDA_ROOTS = ("miniconda3", "anaconda3", "miniforge3", "mambaforge", ".conda", "micromamba")


def job_environment(job: JobRecord, spec: JobSpec, attempt: AttemptRecord, gpus: Mapping[str, str]) -> dict[str, str]:
    """All variables of one attempt; `gpus` are those that name its GPUs (`gpu_variables`, virtual cards, MPS)."""
    env = base_environment(spec, job.uid)
    env |= {
        "ULLAGE_JOB_ID": str(job.id),
        "ULLAGE_JOB_NAME": job.name,
        "ULLAGE_ATTEMPT_NUMBER": str(attempt.number),
        "ULLAGE_CHECKPOINT_EXIT": str(CHECKPOINT_EXIT),
        TOKEN: attempt.token,
    }
    if attempt.promised is not None:
        env["ULLAGE_PROMISED_BYTES"] = str(attempt.promised)
    if job.array_id is not None:
        env |= {"ULLAGE_ARRAY_ID": str(job.array_id), "ULLAGE_ARRAY_INDEX": str(job.array_index)}
    return env | dict(gpus)


def base_environment(spec: JobSpec, uid: int) -> dict[str, str]:
    """What the submitter had, or the least that a program expects, with the venv or conda environment in front."""
    env = {name: value for name, value in spec.env.items() if name not in _DROPPED} or _least(uid)
    env.setdefault("PATH", _PATH)
    if spec.venv is not None:
        env = _in_front(env, Path(spec.venv) / "bin") | {"VIRTUAL_ENV": spec.venv}
        env.pop("PYTHONHOME", None)
    if spec.conda is not None:
        prefix = conda_prefix(spec.conda, env)
        env = _in_front(env, prefix / "bin") | {"CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": spec.conda}
    return env


def gpu_variables(slots: Sequence[str]) -> dict[str, str]:
    """GPUs by UUID, so that no order of devices can be mistaken.

    >>> gpu_variables(["GPU-1", "GPU-2"])["CUDA_VISIBLE_DEVICES"]
    'GPU-1,GPU-2'
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(slots), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def conda_prefix(name: str, env: Mapping[str, str]) -> Path:
    """The folder of a conda environment, by its path or its name; no shell is asked.

    >>> conda_prefix("no-such-environment", {"HOME": "/nowhere"})
    Traceback (most recent call last):
    ...
    ullage.errors.InvalidValue: needed a conda environment; found none named 'no-such-environment' (looked in /nowhere)
    """
    if os.path.isabs(name):
        places = [Path(name)]
    else:
        places = [root / "envs" / name for root in _conda_roots(env)] + _registered(name, env)
    for place in places:
        if (place / "conda-meta").is_dir() or (place / "bin").is_dir():
            return place
    looked = env.get("HOME", "?") if not os.path.isabs(name) else name
    raise InvalidValue(f"needed a conda environment; found none named {name!r} (looked in {looked})")


def _conda_roots(env: Mapping[str, str]) -> list[Path]:
    roots = [Path(env["CONDA_EXE"]).parents[1]] if env.get("CONDA_EXE") else []
    roots += [Path(env[name]) for name in ("MAMBA_ROOT_PREFIX", "CONDA_ROOT") if env.get(name)]
    return roots + [Path(env.get("HOME", "/nonexistent")) / folder for folder in _CONDA_ROOTS] + [Path("/opt/conda")]


def _registered(name: str, env: Mapping[str, str]) -> list[Path]:
    """conda itself writes down where it made environments."""
    try:
        lines = (Path(env.get("HOME", "/nonexistent")) / ".conda/environments.txt").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return [Path(line) for line in lines if Path(line).name == name]


def _in_front(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    return {**env, "PATH": f"{folder}{os.pathsep}{env.get('PATH', _PATH)}"}


def _least(uid: int) -> dict[str, str]:
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return {"PATH": _PATH}
    return {"PATH": _PATH, "HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "LANG": "C.UTF-8"}
