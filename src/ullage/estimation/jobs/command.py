"""The Python script or module that a job's command runs, and the Python that runs it."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ullage.errors import InvalidValue
from ullage.sandbox import recording
from ullage.sandbox.conda import in_conda
from ullage.sandbox.interpreter import Interpreter, find_interpreter

_PYTHON = re.compile(r"(python|pythonw|pypy)(\d+(\.\d+)*)?")
_FLAGS_WITH_VALUE = ("-X", "-W")
_FLAGS = re.compile(r"-[uOBIsEPqSdvb]+")
_LAUNCHERS = ("torchrun", "deepspeed")
_A_RANK_FOR_EACH_GPU = ("accelerate", "deepspeed")  # unless a number is given
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_LAUNCHER_FLAGS = ("--standalone", "--multi_gpu", "--multi-gpu", "--use_fsdp", "--use_deepspeed", "--cpu")
_CONDA = ("conda", "mamba", "micromamba")
EACH_GPU = 0  # ranks: as many as there are GPUs
_UV_PATIENCE = 60  # seconds
_INLINE_METADATA = re.compile(rb"^# /// script\s*$", re.M)


class ScriptCommand(NamedTuple):
    """A script or module with its arguments.

    `program` runs it, such as `python`, `torchrun` or the script itself, and `launcher` runs that, such as `uv run` or
    `conda run -n NAME`. `world_size` is the number of ranks on `nodes` machines: `None` without a launcher, `EACH_GPU`
    for one on each GPU. `launched_by` are the words of a launcher that sets other variables than torchrun does.
    """

    source: str
    args: list[str]
    module: bool
    program: str
    launcher: tuple[str, ...] = ()
    world_size: int | None = None
    nodes: int = 1
    launched_by: tuple[str, ...] = ()

    def ranks(self, gpus: int) -> dict[str, Any]:
        """Return the options of an estimate for the ranks on machines with `gpus` GPUs each. A script with several
        GPUs and no launcher starts a process for each GPU itself."""
        size, by = self.world_size, {"launcher": self.launcher_text} if self.launched_by else {}
        if size is None:
            return {"world_size": gpus} if gpus > 1 else {}
        machines = {"nodes": self.nodes} if self.nodes > 1 else {}
        return {"world_size": size or max(gpus, 1) * self.nodes, **machines, **by}

    @property
    def launcher_text(self) -> str | None:
        """The launcher as an option of an estimate; `None` for torchrun, or without a launcher."""
        return shlex.join(self.launched_by) or None


def script_of(command: Sequence[str]) -> ScriptCommand | None:
    """Return the script or module that a command runs with Python; `None` if it is another program.

    >>> script_of(["torchrun", "--standalone", "--nproc_per_node=1", "train.py", "-b", "8"])[:3]
    ('train.py', ['-b', '8'], False)
    >>> script_of(["accelerate", "launch", "--multi_gpu", "--mixed_precision", "bf16", "train.py"])[:3]
    ('train.py', [], False)
    >>> script_of(["uv", "run", "--extra", "gpu", "train.py"])[:5]
    ('train.py', [], False, 'python', ('uv', 'run', '--extra', 'gpu'))
    >>> script_of(["python", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node", "8", "-m", "train"])[5:7]
    (16, 2)
    >>> script_of(["python", "-c", "print()"]) is None
    True
    """
    name, words = os.path.basename(command[0]), list(command[1:])
    if words[:1] == ["run"] and name in _CONDA:
        return _by_conda(words[1:])
    if words[:1] == ["run"] and name == "uv":
        return _by_uv(command[0], words[1:])
    if name.endswith(".py"):
        return ScriptCommand(command[0], words, False, command[0])
    if name in _LAUNCHERS:
        return _by_launcher(command[0], words, name)
    if name == "accelerate" and words[:1] == ["launch"]:
        return _by_launcher(command[0], words[1:], name)
    return _by_python(command[0], words) if _PYTHON.fullmatch(name) else None


def _by_python(program: str, words: list[str]) -> ScriptCommand | None:
    while words:
        word = words.pop(0)
        if word == "-m" and words:
            if words[0] in _LAUNCHER_MODULES:
                return _by_launcher(program, words[1:], words[0].partition(".")[0])
            return ScriptCommand(words[0], words[1:], True, program)
        if word in _FLAGS_WITH_VALUE and words:
            words.pop(0)
        elif not word.startswith("-"):
            return ScriptCommand(word, words, False, program)
        elif not _FLAGS.fullmatch(word):
            return None
    return None


def _by_launcher(program: str, words: list[str], name: str) -> ScriptCommand | None:
    """Read the launcher's options, each with or without a value, then the script."""
    options: dict[str, str] = {}
    usual = "gpu" if name in _A_RANK_FOR_EACH_GPU else "1"
    given = list(words)
    while words:
        word = words.pop(0)
        module = word in ("-m", "--module") and bool(words)
        if module or (word.endswith(".py") and not word.startswith("-")):
            by = ("accelerate", "launch", *given[: len(given) - len(words) - 1]) if name == "accelerate" else ()
            source, args = (words[0], words[1:]) if module else (word, words)
            return ScriptCommand(source, args, module, program, (), *_ranks(options, usual), by)
        if not word.startswith("-"):
            return None
        option, _, value = word.partition("=")
        is_alone = word in _LAUNCHER_FLAGS or "=" in word or words[:1] and words[0].startswith("-")
        if words and not is_alone and not words[0].endswith(".py"):
            value = words.pop(0)
        options[option.lstrip("-").replace("_", "-")] = value
    return None


def _ranks(options: Mapping[str, str], usual: str) -> tuple[int, int]:
    """Return the numbers of ranks and of machines by the options of a launcher; `usual` is the number that it starts on
    a machine by default.

    >>> _ranks({"nproc-per-node": "8", "nnodes": "2:4"}, "1"), _ranks({"nproc-per-node": "gpu"}, "1")
    ((16, 2), (0, 1))
    """
    first = next((options[name] for name in ("nnodes", "num-machines", "num-nodes") if name in options), "1")
    nodes = _number(first.partition(":")[0]) or 1
    if "num-processes" in options:  # of accelerate, on all machines
        return _number(options["num-processes"]), nodes
    return _number(options.get("nproc-per-node", options.get("num-gpus", usual))) * nodes, nodes


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else EACH_GPU


def _by_conda(words: list[str]) -> ScriptCommand | None:
    environment = None
    while words and words[0].startswith("-"):
        option, equals, value = words.pop(0).partition("=")
        if option in ("-n", "--name", "-p", "--prefix", "--cwd"):
            if not equals:
                value = words.pop(0) if words else ""
            if option == "--cwd":
                return None
            environment = value
    command = script_of(words) if words and environment else None
    return command and command._replace(launcher=("conda", str(environment)))


def _by_uv(uv: str, words: list[str]) -> ScriptCommand | None:
    """Read the words after uv's options; a word before the script or Python is an option or its value."""
    for place, word in enumerate(words):
        if word in ("-m", "--module"):
            rest = ["python", "-m", *words[place + 1 :]]
        elif word.endswith(".py"):
            rest = ["python", *words[place:]]
        elif _PYTHON.fullmatch(os.path.basename(word)) and words[place - 1] not in ("-p", "--python"):
            rest = words[place:]
        else:
            continue
        command = script_of(rest)
        options = [each for each in words[:place] if each not in ("-s", "--script")]
        return command and command._replace(launcher=(uv, "run", *options))
    return None


def python_of(command: ScriptCommand, env: Mapping[str, str]) -> Interpreter:
    """Return the Python that such a command runs, for a process with the rights of the command's user."""
    env = dict(env)
    if command.launcher[:1] == ("conda",):
        env = in_conda(command.launcher[1], env)
    elif command.launcher:
        return find_interpreter(_ask_uv(command, env), env)
    program = shutil.which(command.program, path=env.get("PATH"))
    if program is None:
        raise InvalidValue(f"the command must run a Python, but there is no program {command.program}")
    return find_interpreter(_by_first_line(program, env), env)


def _by_first_line(program: str, env: Mapping[str, str]) -> str:
    """Return the Python in the first line of a program that is a script; other programs lie next to their Python."""
    with open(program, "rb") as file:
        first = file.readline(1024)
    if not first.startswith(b"#!"):
        return program
    named = [word for word in os.fsdecode(first[2:]).split() if "=" not in word and not word.startswith("-")]
    if named and os.path.basename(named[0]) == "env":
        named = [shutil.which(word, path=env.get("PATH")) or word for word in named[1:]]
    if named and _PYTHON.fullmatch(os.path.basename(named[0])):
        return named[0]
    return program if _PYTHON.fullmatch(os.path.basename(program)) else os.path.join(os.path.dirname(program), "python")


def _ask_uv(command: ScriptCommand, env: dict[str, str]) -> str:
    """Ask uv which Python it would run; it makes no environment for that and uses no network."""
    uv, run, *options = command.launcher
    uv = shutil.which(uv, path=env.get("PATH")) or uv
    if command.module or not _has_inline_metadata(command.source):
        ask = "import sys; print(sys.executable)"
        return _output_of([uv, run, *options, "--no-sync", "--offline", command.program, "-c", ask], env)
    python = _output_of([uv, "python", "find", "--offline", "--script", command.source], env)
    if not python.startswith(_output_of([uv, "cache", "dir"], env)):  # another Python: the script has no environment
        raise InvalidValue(f"uv has no environment for {command.source} yet; type: uv sync --script {command.source}")
    return python


def _output_of(words: list[str], env: dict[str, str]) -> str:
    try:
        with recording.paused():
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=_UV_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidValue(f"cannot ask {words[0]} which Python uv runs: {error}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise InvalidValue(f"uv must know which Python it runs, but it says: {last}")
    return done.stdout.strip()


def _has_inline_metadata(script: str) -> bool:
    try:
        with open(script, "rb") as file:
            return _INLINE_METADATA.search(file.read(1 << 20)) is not None
    except OSError:
        return False
