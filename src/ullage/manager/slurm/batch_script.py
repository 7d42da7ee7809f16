"""Reads a batch script: its options for Slurm, its hints for Ullage, and the training that it runs."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UnknownName
from ullage.estimation.jobs.command import ScriptCommand
from ullage.estimation.jobs.launchers import launched
from ullage.estimation.jobs.slurm_words import first_number, tasks_and_nodes
from ullage.jobs.ranks import SLURM
from ullage.manager.slurm.sbatch_options import gpu_request, read_directives
from ullage.manager.slurm.shell import Program, programs_of
from ullage.manager.slurm.shell_words import Unknown
from ullage.units import parse_bytes

_OF_A_LOGIN = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER")
_LARGEST = 4 << 20  # bytes, which is Slurm's own limit


@dataclass(frozen=True)
class Hints:
    """The hints in the `#ULLAGE` lines of a script."""

    gpu: str | None = None
    memory: int | None = None
    exclusive: bool = False
    estimate: bool = True
    network: bool = False
    min_speed: float | None = None


NO_HINTS = Hints()


@dataclass(frozen=True)
class BatchTraining:
    """A Python script as a batch script runs it. `ranks` has the options of its estimate; `on_each_gpu` counts the
    ranks that share a GPU."""

    command: ScriptCommand
    environment: Mapping[str, str] = field(repr=False)
    folder: str
    at_once: bool = False
    ranks: Mapping[str, Any] = field(default_factory=dict)
    on_each_gpu: int = 1

    @property
    def ranks_per_node(self) -> int:
        return int(self.ranks.get("world_size", 1)) // int(self.ranks.get("nodes", 1))

    @property
    def shown(self) -> str:
        return " ".join([*(["-m"] if self.command.module else []), self.command.source, *self.command.args])


@dataclass(frozen=True)
class BatchScript:
    """A batch script. `refusal` says why its training is unknown."""

    options: Mapping[str, str]
    hints: Hints
    trainings: tuple[BatchTraining, ...] = ()
    notes: tuple[str, ...] = ()
    refusal: str | None = None


def read_file(path: str) -> str:
    file = Path(path)
    if not file.is_file():
        problem = "it is a folder" if file.is_dir() else "there is no such file"
        raise InvalidValue(f"{path!r} must be a batch script, but {problem}")
    try:
        with file.open("rb") as source:
            content = source.read(_LARGEST + 1)
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror}") from None
    if not content.startswith(b"#!") or len(content) > _LARGEST or b"\0" in content:
        raise InvalidValue(f"{path} must be a batch script: the first line begins with #!, and it has less than 4 MiB")
    return content.decode(errors="surrogateescape")


def read_batch(
    text: str,
    folder: str,
    environment: Mapping[str, str],
    options: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> BatchScript:
    """Read a batch script. `options` from sbatch's command line override the script's own."""
    given = {**read_directives(text), **(options or {})}
    hints = read_hints(text)
    if not hints.estimate or hints.memory is not None:
        return BatchScript(given, hints)
    if re.match(r"#!.*\bpython[\d.]*\s*$", text.partition("\n")[0]):
        return BatchScript(given, hints, refusal="it is a program of Python; a batch script that runs it is followed")
    start = os.path.join(folder, os.path.expanduser(given.get("chdir", "")))
    variables = {**exported(environment, given.get("export")), **_slurm_variables(given, folder)}
    try:
        programs, notes = programs_of(text, variables, start, arguments)
        trainings = _trainings(programs, given, notes)
    except InvalidValue as error:
        return BatchScript(given, hints, refusal=str(error))
    if not trainings:
        return BatchScript(given, hints, (), tuple(notes), "no Python script was found in it")
    if "array" in given:
        notes.append(f"the job is an array: it was read with the index {first_number(given['array'])}")
    return BatchScript(given, hints, tuple(trainings), tuple(notes))


def exported(environment: Mapping[str, str], export: str | None) -> dict[str, str]:
    """Return the variables that sbatch's option `--export` gives a job; it always gets those of every login.

    >>> exported({"PATH": "/bin", "LR": "1", "SEED": "2"}, "SEED,LR='0.1,0.2'")
    {'PATH': '/bin', 'SEED': '2', 'LR': '0.1,0.2'}
    """
    if export is None:
        return dict(environment)
    words = [word.strip() for word in re.findall(r"""(?:[^,'"]|'[^']*'|"[^"]*")+""", export)]
    given = {
        name: re.sub(r"""(['"])(.*?)\1""", r"\2", value)
        for name, equals, value in (word.partition("=") for word in words)
        if equals
    }
    names = {*words, *_OF_A_LOGIN}
    everything = "ALL" in words
    return {name: value for name, value in environment.items() if everything or name in names} | given


def _slurm_variables(options: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the variables that Slurm sets in a job, as far as they are known in advance."""
    tasks, nodes = map(str, tasks_and_nodes(options))
    index = first_number(options.get("array", ""))
    variables = {
        "SLURM_SUBMIT_DIR": folder,
        "SLURM_JOB_NAME": options.get("job-name"),
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_CPUS_PER_TASK": options.get("cpus-per-task"),
        "SLURM_NTASKS_PER_NODE": options.get("ntasks-per-node"),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "0",
        "SLURM_JOBID": "0",
        "SLURM_ARRAY_JOB_ID": None if index is None else "0",
        "SLURM_ARRAY_TASK_ID": None if index is None else str(index),
        "SLURM_GPUS_ON_NODE": str(gpu_request(options).per_node or 1),
    }
    return {name: value for name, value in variables.items() if value is not None}


def _trainings(programs: Sequence[Program], options: Mapping[str, str], notes: list[str]) -> list[BatchTraining]:
    trainings: dict[tuple[object, ...], BatchTraining] = {}
    for program in programs:
        inner = launched(program.words)
        command = inner.script
        if inner.refusal is not None and _names_python(inner.words):
            raise InvalidValue(f"line {program.line}: {inner.refusal}")
        if command is None:
            if inner.words and re.fullmatch(r"python[\d.]*", os.path.basename(inner.words[0])):
                notes.append(f"line {program.line}: '{' '.join(inner.words)[:80]}' runs no script and was left out")
            continue
        training = _with_ranks(_training(program, command, inner.variables, inner.folder), inner.srun, options)
        key = (
            command.source,
            tuple(command.args),
            training.folder,
            training.environment.get("PATH"),
            training.at_once,
            *training.ranks.values(),
        )
        trainings.setdefault(key, training)
    return list(trainings.values())


def _with_ranks(training: BatchTraining, srun: Mapping[str, str] | None, options: Mapping[str, str]) -> BatchTraining:
    """Return the training with its ranks: its launcher's processes, or srun's tasks."""
    gpus = gpu_request(options).per_node
    ranks = training.command.ranks(gpus or 1)
    variables = dict(training.environment)
    if srun is not None and training.command.launched_by == (SLURM,):
        tasks, nodes = tasks_and_nodes({**options, **srun})
        ranks = {"world_size": tasks, "launcher": SLURM}
        ranks |= {"nodes": nodes} if nodes > 1 and tasks % nodes == 0 else {}
        variables |= {"SLURM_NTASKS": str(tasks), "SLURM_NPROCS": str(tasks)}
        ranks = ranks if tasks > 1 else {}
    with_ranks = replace(training, ranks=ranks, environment=variables)
    return with_ranks if gpus is None else replace(with_ranks, on_each_gpu=-(-with_ranks.ranks_per_node // gpus))


def _names_python(words: Sequence[str]) -> bool:
    return any(re.search(r"\b(python[\d.]*|torchrun|accelerate)\b|\.py\b", word) for word in words)


def _training(
    program: Program, command: ScriptCommand, variables: Mapping[str, str], folder: str | None
) -> BatchTraining:
    unknown = [word for word in (command.source, *command.args, *variables.values()) if isinstance(word, Unknown)]
    if unknown:
        raise InvalidValue(f"line {program.line}: '{unknown[0]}' is known only when the job runs")
    if program.folder is None:
        raise InvalidValue(f"line {program.line}: the folder in which it runs is known only when the job runs")
    if "PATH" not in program.environment:
        raise InvalidValue(f"line {program.line}: the environment in which it runs was not found here")
    where = os.path.normpath(os.path.join(program.folder, folder or ""))
    return BatchTraining(command, {**program.environment, **variables}, where, program.at_once)


def read_hints(text: str) -> Hints:
    """Return the hints in the `#ULLAGE` lines of a script.

    >>> read_hints("#!/bin/bash\\n#ULLAGE gpu=A100-40GB exclusive\\n#ULLAGE memory=12GiB")
    Hints(gpu='A100-40GB', memory=12884901888, exclusive=True, estimate=True, network=False, min_speed=None)
    >>> read_hints("#ULLAGE exclusiv")
    Traceback (most recent call last):
    ...
    ullage.errors.InvalidValue: line 1: no hint named 'exclusiv'; did you mean 'exclusive'?
    """
    values: dict[str, object] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r"#\s*ULLAGE\b[:\s]*(.*)", line)
        for word in match[1].split() if match else ():
            name, _, value = word.removeprefix("--").partition("=")
            try:
                values |= _hint(name, value)
            except (InvalidValue, UnknownName) as error:
                raise InvalidValue(f"line {number}: {error}") from None
    return Hints(**values)  # type: ignore[arg-type]


def _hint(name: str, value: str) -> dict[str, object]:
    if name in ("exclusive", "network") and not value:
        return {name: True}
    if name == "no-estimate" and not value:
        return {"estimate": False}
    if name == "gpu" and value:
        return {"gpu": value}
    if name == "memory":
        return {"memory": parse_bytes(value)}
    if name == "min-speed":
        try:
            speed = float(value)
        except ValueError:
            speed = 0.0
        if not 0 < speed <= 1:
            raise InvalidValue(f"min-speed must be a share such as 0.8, got {value!r}")
        return {"min_speed": speed}
    known = ["gpu", "memory", "exclusive", "no-estimate", "network", "min-speed"]
    if name in known:
        raise InvalidValue(f"{name} cannot be {value!r}")
    raise UnknownName("hint", name, known)
