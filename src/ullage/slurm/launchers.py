"""What a launcher launches: `srun -n 4 python train.py` runs `python train.py`, four times."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ullage.slurm.sbatch_options import read_words

_CONTAINERS = ("apptainer", "singularity", "docker", "podman", "enroot", "shifter", "ch-run", "charliecloud")
# Programs that run another one: their options with a value. What else begins with "-" is a flag.
_WRAPPERS = {
    "time": ("-f", "-o"), "nohup": (), "nice": ("-n",), "ionice": ("-c", "-n"), "setsid": (),
    "stdbuf": ("-i", "-o", "-e"), "numactl": (), "catchsegv": (), "unbuffer": (),
    "xvfb-run": ("-s", "-n"),
}  # fmt: skip
_MPI = ("mpirun", "mpiexec", "orterun", "prun", "horovodrun", "jsrun", "aprun", "ibrun")


@dataclass(frozen=True)
class Launched:
    """The words of what is launched, the variables that are set for it, and why it cannot be followed, if so. `srun`
    are the options of the srun that launches it; `None` where none does."""

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None
    refusal: str | None = None
    srun: Mapping[str, str] | None = None


def launched(words: Sequence[str]) -> Launched:
    """What is left without `srun`, `env`, `nohup` and the like before it.

    >>> launched(["srun", "-n", "2", "--label", "env", "A=1", "python", "train.py"])
    Launched(words=('python', 'train.py'), variables={'A': '1'}, ..., srun={'ntasks': '2', 'label': ''})
    >>> launched(["apptainer", "exec", "image.sif", "python", "train.py"]).refusal
    'it runs in a container (apptainer), whose Python is not looked into'
    """
    left, variables, folder, srun = list(words), dict[str, str](), None, None
    while left:
        name = os.path.basename(left[0])
        if name in _CONTAINERS:
            return Launched(tuple(left), refusal=f"it runs in a container ({name}), whose Python is not looked into")
        if name in _MPI:
            return Launched(tuple(left), refusal=f"it is started by {name}, which is not followed")
        if name == "srun":
            found = read_words(left[1:], srun=True)
            image = next((key for key in found.values if key.startswith("container")), None)
            if image is not None:
                return Launched(found.rest, refusal=f"it runs in a container (srun --{image})")
            folder = found.values.get("chdir", folder)
            left, srun = list(found.rest), found.values
        elif name == "env":
            left = _without_options(left[1:], ("-u", "-C", "-S"))
            while left and re.match(r"[A-Za-z_]\w*=", left[0]):
                key, _, value = left.pop(0).partition("=")
                variables[key] = value
        elif name == "timeout":
            left = _without_options(left[1:], ("-k", "-s"))[1:]
        elif name == "taskset":
            left = _without_options(left[1:], ())[1:]
        elif name in _WRAPPERS:
            left = _without_options(left[1:], _WRAPPERS[name])
        else:
            break
    return Launched(tuple(left), variables, folder, srun=srun)


def _without_options(words: list[str], with_value: Sequence[str]) -> list[str]:
    left = list(words)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        if word == "--":
            break
        if word in with_value and left:
            left.pop(0)
    return left
