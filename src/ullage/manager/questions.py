"""What an estimator can be asked about a job: its script or its model; and the key by which the answer is kept."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import ullage
from ullage.manager.submission import Spec

_MOST_FILES, _MOST_FOLDERS, _LARGEST_FILE = 200, 64, 4 << 20
_NOT_CODE = ("__pycache__", "venv", "node_modules", "data", "datasets", "runs", "wandb")
_PYTHON = re.compile(r"(python|pythonw|pypy)(\d+(\.\d+)*)?")
_FLAGS_WITH_VALUE = ("-X", "-W")
_FLAGS = re.compile(r"-[uOBIsEPqSdvb]+")
_MEMORY_VARIABLES = re.compile(r"(PYTORCH|TORCH|CUDA|CUBLAS|CUDNN|NVIDIA_TF32)_?.*")


@dataclass(frozen=True)
class Question:
    """One thing to estimate: a script with its arguments, a module, or a model's name with options."""

    source: str
    args: tuple[str, ...] = ()
    module: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def questions_of(spec: Spec) -> list[Question]:
    """What can be asked about a job, the most telling first; empty where there is nothing to run or to name.

    >>> questions_of(Spec(command=["python", "-u", "train.py", "--lr", "1"], cwd="/work"))[0].source
    '/work/train.py'
    >>> questions_of(Spec(command=["make", "train"], cwd="/work"))
    []
    """
    found = []
    if spec.model is not None:
        options = {**spec.estimate_options} | ({"batch_size": spec.batch_size} if spec.batch_size else {})
        path = os.path.join(spec.cwd, spec.model)
        found.append(Question(path if os.path.exists(path) else spec.model, options=options))
    script = script_of(spec.command)
    if script is not None:
        source, args, module = script
        found.append(Question(source if module else os.path.join(spec.cwd, source), tuple(args), module))
    return found


def script_of(command: Sequence[str]) -> tuple[str, list[str], bool] | None:
    """The script or module that a command runs with Python, and its arguments; `None` if it is another program.

    >>> script_of(["torchrun", "--standalone", "--nproc_per_node=1", "train.py", "-b", "8"])
    ('train.py', ['-b', '8'], False)
    >>> script_of(["python", "-m", "project.train", "--lr", "1"])
    ('project.train', ['--lr', '1'], True)
    >>> script_of(["python", "-c", "print()"]) is None
    True
    """
    name = os.path.basename(command[0])
    if command[0].endswith(".py"):
        return command[0], list(command[1:]), False
    if name == "torchrun":
        return _torchrun(list(command[1:]))
    if not _PYTHON.fullmatch(name):
        return None
    words = list(command[1:])
    while words:
        word = words.pop(0)
        if word == "-m" and words:
            return words[0], words[1:], True
        if word in _FLAGS_WITH_VALUE and words:
            words.pop(0)
        elif not word.startswith("-"):
            return word, words, False
        elif not _FLAGS.fullmatch(word):
            return None
    return None


def _torchrun(words: list[str]) -> tuple[str, list[str], bool] | None:
    while words:
        word = words.pop(0)
        if word == "--standalone" or word.startswith("--") and "=" in word:
            continue
        if word.startswith("--") and words and not words[0].endswith(".py"):
            words.pop(0)
        elif word.endswith(".py"):
            return word, words, False
        else:
            return None
    return None


def key_of(questions: Sequence[Question], estimator: str, gpus: Sequence[str], env: Mapping[str, str], cwd: str) -> str:
    """A key that is the same for the same content: code, arguments, GPUs, versions and what changes memory."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    known = {
        "versions": [ullage.__version__, torch, estimator],
        "gpus": sorted(set(gpus)),
        "env": sorted((name, value) for name, value in env.items() if _MEMORY_VARIABLES.fullmatch(name)),
        "questions": [{**asdict(question), "content": _content(question, cwd)} for question in questions],
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()


def _content(question: Question, cwd: str) -> str | None:
    """What the source is made of: the file and the Python files beside it, since a script imports its neighbours."""
    if question.module:
        files = _python_files(cwd)
    elif os.path.isabs(question.source):
        files = [question.source, *_python_files(os.path.dirname(question.source))]
    else:
        return None
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file}\0{_digest(file)}\0".encode())
    return total.hexdigest()


def _python_files(folder: str) -> list[str]:
    """Python files in a folder and below; no more folders are looked at than a project has, for data may lie there."""
    found: list[str] = []
    for seen, (place, folders, names) in enumerate(os.walk(folder)):
        if seen >= _MOST_FOLDERS or len(found) >= _MOST_FILES:
            break
        folders[:] = sorted(each for each in folders if each.isidentifier() and each not in _NOT_CODE)[:_MOST_FOLDERS]
        found += [os.path.join(place, name) for name in sorted(names) if name.endswith(".py")]
    return found[:_MOST_FILES]


def _digest(path: str) -> str | None:
    """Of a plain file only: a pipe or a device must not hold up the daemon."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            return hashlib.sha256(file.read(_LARGEST_FILE)).hexdigest()
    except OSError:
        return None
