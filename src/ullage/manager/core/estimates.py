"""Estimates of submitted jobs: each in a process of its own with limits of time and memory, kept by content."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import ullage
from ullage.isolation.environment import environment
from ullage.isolation.limits import Limits
from ullage.isolation.parent import Outcome, run
from ullage.manager.settings import EstimateSettings
from ullage.workloads.job_files import JobSpec

_MOST_FILES, _MOST_FOLDERS, _LARGEST_FILE = 200, 64, 4 << 20
_NOT_CODE = ("__pycache__", "venv", "node_modules", "data", "datasets", "runs", "wandb")
_PYTHON = re.compile(r"(python|pythonw|pypy)(\d+(\.\d+)*)?")
_FLAGS_WITH_VALUE = ("-X", "-W")
_FLAGS = re.compile(r"-[uOBIsEPqSdvb]+")
_MEMORY_VARIABLES = re.compile(r"(PYTORCH|TORCH|CUDA|CUBLAS|CUDNN|NVIDIA_TF32)_?.*")


@dataclass(frozen=True)
class EstimateQuestion:
    """One thing to estimate: a script with its arguments, a module, or a model's name with options."""

    source: str
    args: tuple[str, ...] = ()
    module: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def questions_of(spec: JobSpec) -> list[EstimateQuestion]:
    """What can be asked about a job, the most telling first; empty where there is nothing to run or to name.

    >>> questions_of(JobSpec(command=["python", "-u", "train.py", "--lr", "1"], cwd="/home/ann"))[0].source
    '/home/ann/train.py'
    >>> questions_of(JobSpec(command=["make", "train"], cwd="/home/ann"))
    []
    """
    found = []
    if spec.model is not None:
        options = {**spec.estimate} | ({"batch_size": spec.batch_size} if spec.batch_size else {})
        path = os.path.join(spec.folder, spec.model)
        found.append(EstimateQuestion(path if os.path.exists(path) else spec.model, options=options))
    script = script_of(spec.command)
    if script is not None:
        source, args, module = script
        found.append(EstimateQuestion(source if module else os.path.join(spec.folder, source), tuple(args), module))
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


def key_of(
    questions: Sequence[EstimateQuestion], estimator: str, gpus: Sequence[str], env: Mapping[str, str], cwd: str
) -> str:
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


def _content(question: EstimateQuestion, cwd: str) -> str | None:
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


_ENTRY = "ullage.manager.core.estimating_child:estimate_here"
_LONGEST_ANSWER, _LONGEST_NOTE = 1 << 20, 400  # bytes, characters


@dataclass(frozen=True)
class EstimateRequest:
    """An estimate to make, with the key by which it is kept. `env`, `cwd` and `rights` are the job's."""

    key: str
    estimator: str
    questions: Sequence[EstimateQuestion]
    gpus: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    rights: Mapping[str, int | str]


@dataclass(frozen=True)
class EstimateAnswer:
    """The result of an estimate: `upper` in bytes, or `None`, and a note that says where it comes from or why not."""

    key: str
    upper: int | None
    note: str
    seconds: float


class Estimates:
    """Makes the estimates that are asked for, a few at once; `done` is told of each, in the event loop's thread."""

    def __init__(self, rules: EstimateSettings, done: Callable[[EstimateAnswer], None]) -> None:
        self._rules, self._done = rules, done
        self._waiting: dict[str, EstimateRequest] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(rules.at_once, "estimate")  # one waits for each child
        self._closing = threading.Event()

    def want(self, wanted: EstimateRequest) -> None:
        """Ask for an estimate. One that is under way already is not made twice."""
        if wanted.key not in self._running:
            self._waiting.setdefault(wanted.key, wanted)
        self._begin()

    @property
    def pending(self) -> int:
        """How many estimates are under way or waiting."""
        return len(self._waiting) + len(self._running)

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self._rules.at_once:
            key = next(iter(self._waiting))
            wanted = self._waiting.pop(key)
            self._running[key] = asyncio.get_running_loop().create_task(self._make(wanted))

    async def _make(self, wanted: EstimateRequest) -> None:
        began = time.monotonic()
        try:
            upper, note = _read(await self._ask(wanted), wanted.estimator)
        except OSError as error:
            upper, note = None, f"not estimated: {error.strerror or error}"
        finally:
            self._running.pop(wanted.key, None)
        self._done(EstimateAnswer(wanted.key, upper, note, time.monotonic() - began))
        self._begin()

    async def _ask(self, wanted: EstimateRequest) -> Outcome:
        request = {
            "estimator": wanted.estimator,
            "gpus": sorted(set(wanted.gpus)),
            "timeout": self._rules.timeout,
            "questions": [asdict(question) for question in wanted.questions],
        }
        limits = Limits(seconds=self._rules.timeout, memory=self._rules.memory, answer=_LONGEST_ANSWER)
        env = {**environment(wanted.env), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        ask = partial(
            run, _ENTRY, request, limits=limits, env=env, cwd=wanted.cwd, rights=wanted.rights, stop=self._closing
        )
        return await asyncio.get_running_loop().run_in_executor(self._threads, ask)

    async def close(self) -> None:
        """Give up all that are under way; their jobs are asked about again later."""
        tasks = list(self._running.values())
        self._waiting.clear()
        self._closing.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown()


def _read(outcome: Outcome, estimator: str) -> tuple[int | None, str]:
    """The bound, or `None`, and the note that the job keeps."""
    answer = outcome.answer
    if answer is not None and "failed" not in answer:
        fits = "" if answer["fits"] else f", which does not fit on {answer['gpu']}"
        return int(answer["upper"]), f"estimated by {estimator} for {answer['gpu']}{fits}"
    told = answer["failed"] if answer else outcome.failure if outcome.reason == "error" else f"it {outcome.failure}"
    return None, f"not estimated: {str(told)[:_LONGEST_NOTE]}"
