"""The command behind a launcher: `srun -n 4 python train.py` runs `python train.py`, four times."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ullage.estimation.jobs.command import EACH_GPU, ScriptCommand, script_of
from ullage.estimation.jobs.slurm_words import first_number, read_words, tasks_and_nodes
from ullage.jobs.ranks import MPI, NOT_FOLLOWED, SLURM

_CONTAINERS = ("apptainer", "singularity", "docker", "podman", "enroot", "shifter", "ch-run", "charliecloud")
# Programs that run another one, and their options with a value. Other words that begin with "-" are flags.
_WRAPPERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("nohup", "setsid", "numactl", "catchsegv", "unbuffer"), ()),
    **{"time": ("-f", "-o"), "nice": ("-n",), "ionice": ("-c", "-n")},
    **{"stdbuf": ("-i", "-o", "-e"), "xvfb-run": ("-s", "-n")},
}
_MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun")
_PYTHON = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|env|\S+\.py")
_VALUES_OF_MPI = {"x": 1, "genv": 2, "env": 2, "mca": 2, "pmixmca": 2, "prtemca": 2}  # options of two words, and `-x`


@dataclass(frozen=True)
class Launched:
    """A launched command: its words, the variables set for it, and the reason (`refusal`) if it cannot be followed.

    It is started `world_size` times, on `nodes` machines, if `launcher` (`mpirun`, `srun`) was given a number.
    `srun` has the options of the srun that launches it; `None` without one.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None
    refusal: str | None = None
    world_size: int | None = None
    nodes: int = 1
    launcher: str | None = None
    srun: Mapping[str, str] | None = None

    @property
    def script(self) -> ScriptCommand | None:
        """The script, with the ranks of the innermost program that starts several."""
        command = script_of(self.words) if self.words else None
        if command is None or command.world_size is not None or self.launcher is None:
            return command
        return command._replace(world_size=self.world_size or EACH_GPU, nodes=self.nodes, launched_by=(self.launcher,))


def launched(words: Sequence[str]) -> Launched:
    """Return the command without `srun`, `mpirun`, `env`, `nohup` and the like before it.

    >>> found = launched(["srun", "-n", "2", "--label", "env", "A=1", "python", "train.py"])
    >>> found.words, found.variables, found.world_size
    (('python', 'train.py'), {'A': '1'}, 2)
    >>> launched(["apptainer", "exec", "image.sif", "python", "train.py"]).refusal
    'it runs in a container (apptainer), whose Python is not looked into'
    """
    left, variables, folder, srun = list(words), dict[str, str](), None, None
    ranks: tuple[int | None, int, str | None] = None, 1, None
    while left:
        name = os.path.basename(left[0])
        if name in _CONTAINERS:
            return Launched(tuple(left), refusal=f"it runs in a container ({name}), whose Python is not looked into")
        if name in NOT_FOLLOWED:
            return Launched(tuple(left), refusal=f"it is started by {name}, which is not followed")
        if name in _MPI:
            options, left = _options_of_mpi(left[1:], variables)
            if ":" in left:
                return Launched(tuple(left), refusal=f"{name} starts several programs, of which none is followed alone")
            folder = options.get("wdir", options.get("wd", folder))
            ranks = *_ranks_of_mpi(options), MPI
        elif name == "srun":
            srun_words = read_words(left[1:], srun=True)
            image = next((key for key in srun_words.values if key.startswith("container")), None)
            if image is not None:
                return Launched(srun_words.rest, refusal=f"it runs in a container (srun --{image})")
            folder = srun_words.values.get("chdir", folder)
            left, srun = list(srun_words.rest), srun_words.values
            tasks, nodes = tasks_and_nodes(srun)
            is_known = "ntasks" in srun or "ntasks-per-node" in srun
            ranks = tasks if is_known else None, nodes if tasks % nodes == 0 else 1, SLURM
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
    return Launched(tuple(left), variables, folder, None, *ranks, srun)


def _options_of_mpi(words: list[str], variables: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of `mpirun`, which end where a Python program begins; `variables` gets those that they set.

    >>> _options_of_mpi(["-n", "4", "-x", "A=1", "--bind-to", "none", "python", "t.py", "-n", "2"], {})
    ({'n': '4', 'bind-to': 'none'}, ['python', 't.py', '-n', '2'])
    """
    left, options = list(words), dict[str, str]()
    while left and left[0].startswith("-"):
        option, _, value = left.pop(0).lstrip("-").partition("=")
        if option in _VALUES_OF_MPI:
            given, left = left[: _VALUES_OF_MPI[option]], left[_VALUES_OF_MPI[option] :]
            key, _, set_to = ("=".join(given)).partition("=")
            if option in ("x", "genv", "env") and set_to:
                variables[key] = set_to
        elif not value and left and not left[0].startswith("-") and not _PYTHON.fullmatch(os.path.basename(left[0])):
            value = left.pop(0)
            options[option] = value
        else:
            options[option] = value
    return options, left


def _ranks_of_mpi(options: Mapping[str, str]) -> tuple[int | None, int]:
    by = re.fullmatch(r"ppr:(\d+):node.*", options.get("map-by", ""))
    hosts = options.get("H", options.get("host", options.get("hosts", ""))).split(",")
    each = _number(options, "npernode", "N", "ppn", "perhost", "ntasks-per-node") or (int(by[1]) if by else None)
    return _on_machines(_number(options, "np", "n", "c"), each, len(hosts))


def _on_machines(ranks: int | None, each: int | None, machines: int) -> tuple[int | None, int]:
    """Return the numbers of ranks and of machines; `each` is the number of ranks on a machine, if known."""
    ranks = ranks or (each * machines if each else None)
    if ranks and each and ranks % each == 0:
        machines = ranks // each
    return ranks, machines if not ranks or ranks % machines == 0 else 1


def _number(options: Mapping[str, str], *names: str) -> int | None:
    return next(filter(None, (first_number(options.get(name)) for name in names)), None)


def _without_options(words: list[str], with_value: Sequence[str]) -> list[str]:
    left = list(words)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        if word == "--":
            break
        if word in with_value and left:
            left.pop(0)
    return left
