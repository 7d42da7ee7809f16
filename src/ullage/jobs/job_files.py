"""What a job is to the manager (`JobSpec`), and the files that describe one: TOML, and `.rad` files of RAD-RM."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from ullage.errors import InvalidValue, MissingPackage, nearest
from ullage.text import plain
from ullage.units import MIB

try:
    from pydantic import (
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        StringConstraints,
        ValidationError,
        field_validator,
        model_validator,
    )

    from ullage.jobs.schedules import (
        LARGEST_INDEX,
        LONGEST_ARRAY,
        MOST_DEPENDENCIES,
        Dependency,
        StartTime,
        parse_array,
    )
    from ullage.jobs.validation import Bytes, Int, Seconds, first_problem
except ModuleNotFoundError:
    raise MissingPackage("pydantic", "job files") from None

LARGEST_FILE = 256 << 10  # bytes
MOST_WORDS, LONGEST_COMMAND, LARGEST_ENVIRONMENT = 4096, 128 << 10, 512 << 10

_Text = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00]*$")]
_Value = Annotated[str, StringConstraints(max_length=LONGEST_COMMAND, pattern=r"^[^\x00]*$")]
_Name = Annotated[
    str,
    BeforeValidator(lambda name: plain(name) if isinstance(name, str) else name),
    StringConstraints(min_length=1, max_length=128),
]


# What may stand for a value in the path of an output.
OUTPUT_PATTERNS = {
    "j": "job",
    "A": "array",
    "a": "array index",
    "t": "attempt",
    "n": "name",
    "u": "user",
    "%": "a percent sign",
}
OUTPUT_HELP = ", ".join(f"%{letter} ({meaning})" for letter, meaning in OUTPUT_PATTERNS.items())


RESOURCES, SCHEDULE, RUN = "Resources", "When it runs", "How it runs"


@dataclass(frozen=True)
class JobOption:
    """How a field of `JobSpec` is an option of `ullage submit` and `ullage edit`; one that takes nothing is a flag."""

    help: str
    takes: str | None = None
    panel: str | None = None
    letter: str | None = None
    default: str | None = None  # as the help says it
    off: str | None = None  # the flag that means the opposite
    complete: str | None = None  # a function of `ullage.cli.completion`


class JobSpec(BaseModel):
    """A job as its submitter asks for it, from a job file, `ullage submit`, `ullage.manager.Client` or the API.

    `None` means that nothing was said. Sizes are in bytes or text such as `12GiB`, times in seconds or text such as
    `90m`. `memory` is the promise that the job asks for on each of its GPUs, instead of an estimate.

    Not covered: whether the command exists, the GPUs are there or the jobs to wait for are known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    command: list[_Text] = Field(min_length=1, max_length=MOST_WORDS)
    name: Annotated[_Name | None, JobOption("Name the job.", "NAME", letter="N")] = None
    gpus: Annotated[Int, JobOption("Number of GPUs; 0 for a job that uses none.", "N", RESOURCES, default="1")] = Field(
        1, ge=0, le=1024
    )
    memory: Annotated[
        Bytes | None,
        JobOption("GPU memory to promise the job on each GPU, such as 6GiB.", "SIZE", RESOURCES, default="estimated"),
    ] = Field(None, gt=0, le=1 << 50)
    cores: Annotated[
        Int | None, JobOption("Processor cores to promise the job.", "N", RESOURCES, default="as the server has it")
    ] = Field(None, ge=1, le=1 << 16)
    host_memory: Annotated[
        Bytes | None,
        JobOption(
            "Host memory to promise the job, which is also its limit, such as 32GiB.",
            "SIZE",
            RESOURCES,
            default="as the server has it",
        ),
    ] = Field(None, gt=0, le=1 << 60)
    exclusive: Annotated[
        bool,
        JobOption(
            "Give the job GPUs of its own, or let it share them.", panel=RESOURCES, default="shared", off="shared"
        ),
    ] = False
    min_speed: Annotated[
        float | None,
        JobOption(
            "Share a GPU only if the job keeps at least this share of its speed, such as 0.8.",
            "SHARE",
            RESOURCES,
            default="as the server has it",
        ),
    ] = Field(None, ge=0, le=1)
    model: Annotated[
        _Text | None,
        JobOption(
            "Estimate this model instead of the command's script, such as torchvision:resnet50.",
            "SOURCE",
            RESOURCES,
            complete="sources",
        ),
    ] = None
    batch_size: Annotated[Int | None, JobOption("With --model: samples in a batch.", "N", RESOURCES, letter="b")] = (
        Field(None, ge=1, le=1 << 40)
    )
    estimate: dict[_Text, Any] = {}
    estimator: Annotated[
        _Name | None,
        JobOption(
            "Which estimator to use, or none.",
            "NAME",
            RESOURCES,
            letter="e",
            default="the daemon's",
            complete="estimators",
        ),
    ] = None
    array: Annotated[
        list[int] | None,
        JobOption(
            "Submit one job for each index: 1-20, 0-10:2 or 1,5,7; 1-1000%8 runs at most 8 at once. {index} in the "
            "command becomes the index.",
            "INDICES",
            SCHEDULE,
        ),
    ] = Field(None, min_length=1, max_length=LONGEST_ARRAY)
    throttle: Annotated[Int | None, JobOption("Run at most this many jobs of the array at once.", "N", SCHEDULE)] = (
        Field(None, ge=1, le=LONGEST_ARRAY)
    )
    after: Annotated[
        list[Dependency],
        JobOption(
            "Start after job 17 is done (17), or after it is over in any way (any:17); also 12_3, 12_all, a name, or "
            "in an array 12_{index}. Can be given more than once.",
            "JOB",
            SCHEDULE,
            complete="jobs",
        ),
    ] = Field([], max_length=MOST_DEPENDENCIES)
    begin: Annotated[
        StartTime | None,
        JobOption("Do not start before this time: 2026-11-20T08:00, 22:00 or now+2h.", "TIME", SCHEDULE),
    ] = None
    priority: Annotated[Int, JobOption("Jobs with a higher priority start first.", "N", SCHEDULE, default="0")] = Field(
        0, ge=-1000, le=1000
    )
    hold: Annotated[bool, JobOption("Do not start before 'ullage edit --release'.", panel=SCHEDULE)] = False
    time_limit: Annotated[
        Seconds | None, JobOption("Stop the job after this long, such as 90m or 12h.", "TIME", SCHEDULE, letter="t")
    ] = Field(None, gt=0, le=3.2e9)
    retries: Annotated[Int, JobOption("Retry the job up to this many times if it fails.", "N", RUN, default="0")] = (
        Field(0, ge=0, le=1000)
    )
    requeue: Annotated[
        bool,
        JobOption(
            "Whether the job may start again after a failure; with --no-requeue it starts once.",
            panel=RUN,
            default="requeue",
            off="no-requeue",
        ),
    ] = True
    cwd: Annotated[
        _Text | None,
        JobOption("Run in this folder.", "FOLDER", RUN, letter="C", default="this folder, or the job file's"),
    ] = None
    venv: Annotated[_Text | None, JobOption("Run in this virtual environment.", "FOLDER", RUN)] = None
    conda: Annotated[_Text | None, JobOption("Run in this conda environment.", "NAME", RUN)] = None
    env: dict[_Text, _Value] = {}
    output: Annotated[
        _Text | None,
        JobOption(
            "Write what the job prints to this file, such as logs/%j.out: %j is the job, %A its array, %a its index, "
            "%t the attempt, %n its name, %u its user.",
            "FILE",
            RUN,
            letter="o",
        ),
    ] = None
    error: Annotated[
        _Text | None, JobOption("Write its standard error to this file.", "FILE", RUN, default="the file of --output")
    ] = None
    resumable: Annotated[bool, JobOption("The job saves a checkpoint on SIGUSR1 and can be resumed.", panel=RUN)] = (
        False
    )
    checkpoint_signal: Literal["USR1", "USR2", "TERM", "INT", "HUP"] | None = None
    checkpoint_lead: Seconds | None = Field(None, ge=0, le=3.2e9)
    mps_threads: Annotated[
        Int | None,
        JobOption("With 'ullage serve --sharing mps': the job's percentage of the GPU's threads.", "PERCENT", RUN),
    ] = Field(None, ge=1, le=100)
    mps_memory: Annotated[
        Bytes | None, JobOption("With 'ullage serve --sharing mps': limit the job's GPU memory.", "SIZE", RUN)
    ] = Field(None, gt=0, le=1 << 50)
    on_end: Annotated[
        list[_Text] | None,
        JobOption("Run this command at the job's end, with the result as JSON on its standard input.", "COMMAND", RUN),
    ] = Field(None, min_length=1, max_length=MOST_WORDS)
    umask: Int = Field(0o022, ge=0, le=0o777)
    interactive: Annotated[
        bool,
        JobOption(
            "Run the command at a terminal, and connect to it when it runs. Without a command: your shell.", letter="i"
        ),
    ] = False

    @field_validator("command", "on_end", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """A command in one line is split as a shell would; no shell is run."""
        if not isinstance(value, str):
            return value
        try:
            return shlex.split(value)
        except ValueError as error:
            raise ValueError(f"needed a command whose quotes match; found {value[:80]!r} ({error})") from None

    @field_validator("command")
    @classmethod
    def _not_empty(cls, words: list[str]) -> list[str]:
        if not words[0] or sum(map(len, words)) > LONGEST_COMMAND:
            raise ValueError(f"needed a program and its arguments, at most {LONGEST_COMMAND} characters")
        return words

    @field_validator("cwd", "venv")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        if path is not None and not os.path.isabs(path):
            raise ValueError(f"needed an absolute path; found {path[:80]!r}")
        return path

    @field_validator("output", "error")
    @classmethod
    def _patterns(cls, path: str | None) -> str | None:
        for match in re.finditer(r"%(.?)", path or ""):
            if match[1] not in OUTPUT_PATTERNS:
                raise ValueError(f"needed a path with {OUTPUT_HELP}; found {match[0]!r} in {str(path)[:80]!r}")
        return path

    @field_validator("env", mode="before")
    @classmethod
    def _numbers_as_text(cls, value: Any) -> Any:
        """Numbers may be written without quotes."""
        if not isinstance(value, dict):
            return value
        return {name: str(each) if type(each) in (int, float) else each for name, each in value.items()}

    @field_validator("env")
    @classmethod
    def _variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not name or "=" in name:
                raise ValueError(f"needed names of variables, without =; found {name[:80]!r}")
        if sum(len(name) + len(value) for name, value in env.items()) > LARGEST_ENVIRONMENT:
            raise ValueError(f"needed an environment of at most {LARGEST_ENVIRONMENT} characters")
        return env

    @model_validator(mode="before")
    @classmethod
    def _array_and_throttle(cls, values: Any) -> Any:
        """`array = "1-1000%8"` says both: the indices, and that at most 8 run at once."""
        if isinstance(values, Mapping) and isinstance(values.get("array"), str) and "%" in values["array"]:
            indices, _, throttle = values["array"].partition("%")
            return {**values, "array": indices, "throttle": throttle.strip()}
        return values

    @field_validator("array", mode="before")
    @classmethod
    def _indices(cls, value: Any) -> Any:
        return parse_array(value) if isinstance(value, str) else value

    @field_validator("array")
    @classmethod
    def _different(cls, array: list[int] | None) -> list[int] | None:
        if array is not None and (len(set(array)) < len(array) or min(array) < 0 or max(array) > LARGEST_INDEX):
            raise ValueError(f"needed different indices from 0 to {LARGEST_INDEX}")
        return array

    @field_validator("after", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [value]

    @model_validator(mode="after")
    def _at_a_terminal(self) -> JobSpec:
        if self.interactive:
            others = ("array", "output", "error", "retries", "resumable")
            found = [name for name in others if getattr(self, name)]
            if found:
                raise ValueError(f"interactive: a job at a terminal cannot have {found[0]} too")
        return self

    @model_validator(mode="after")
    def _one_environment(self) -> JobSpec:
        if self.venv and self.conda:
            raise ValueError("needed a venv or a conda environment; found both")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        if self.throttle is not None and self.array is None:
            raise ValueError("throttle: needed an array whose jobs it limits; found none")
        if not self.requeue and (self.retries or self.resumable):
            other = "retries" if self.retries else "resumable"
            raise ValueError(f"requeue: a job that is never started twice cannot have {other} too")
        if self.gpus == 0 and (self.memory is not None or self.exclusive):
            asked = "exclusive" if self.memory is None else "memory"
            raise ValueError(f"needed gpus of 1 or more for {asked}; found 0")
        return self

    @property
    def title(self) -> str:
        """The name, or what the command runs."""
        if self.name:
            return self.name
        script = next((word for word in self.command[1:] if word.endswith(".py")), self.command[0])
        return plain(os.path.basename(script))[:128] or "job"

    @property
    def folder(self) -> str:
        """The folder to run in. Whoever submits a job sets it; a job file may leave it out."""
        if self.cwd is None:
            raise InvalidValue("the job: needed a cwd, the folder to run in; found none")
        return self.cwd

    def said(self) -> dict[str, Any]:
        """What was asked for, ready for JSON; what was not said is left out."""
        said = self.model_dump(mode="json", exclude_unset=True)
        if self.after:
            said["after"] = [each.model_dump() for each in self.after]
        return said

    def with_changes(self, **changes: Any) -> JobSpec:
        """The same job with other values for some fields, checked as the first ones were."""
        return make_job({**self.said(), **changes}, "the job")


# What can be changed of a job that waits.
EDITABLE = (
    "name",
    "gpus",
    "memory",
    "cores",
    "host_memory",
    "exclusive",
    "min_speed",
    "estimator",
    "throttle",
    "after",
    "begin",
    "priority",
    "time_limit",
    "retries",
    "requeue",
    "resumable",
    "checkpoint_signal",
    "checkpoint_lead",
    "mps_threads",
    "mps_memory",
)

# `.rad` files are the job files of RAD-RM (dissertation, listing 6.1). Two forms are in use. The keyed one, of the
# listing: an environment (`conda activate NAME`), the command, then lines such as `model: resnet.txt`,
# `batch_size: 128`, `policy: exclusive`, `gpus: 2`. The positional one, which RAD-RM's code reads: the same two lines,
# then model summary, data set, batch size, policy and number of GPUs, each on a line of its own, and in most files four
# more figures in MiB: the memory measured, and the estimates of Horus, FakeTensor and GPUMemNet.
#
# RAD-RM's code never looks at the policy of the positional form: every published file says `exclusive` and is placed by
# the site's policy. So it is not followed here either, and a note says so. In the keyed form it is followed.

POSITIONS = ("model", "dataset", "batch_size", "policy", "gpus", "measured", "horus", "faketensor", "gpumemnet")
_NOT_KEYED = ("command", "env", "estimate", "exclusive", "mps_threads", "mps_memory", "umask", "output", "error")
KEYS = ("policy", "dataset", *(name for name in JobSpec.model_fields if name not in (*_NOT_KEYED, "interactive")))
_FIGURES = POSITIONS[5:]
_KEYED = re.compile(r"([A-Za-z_][A-Za-z_ -]*?)\s*:(\s.*|)", re.DOTALL)
_KEYED_TIGHT = re.compile(rf"({'|'.join(KEYS)}):(.*)", re.IGNORECASE | re.DOTALL)
_CONDA = re.compile(r"(?:conda|mamba|micromamba|source)\s+activate\s+(\S+)")
_VENV = re.compile(r"(?:source|\.)\s+(\S*?)/?(?:bin/)?activate")
_MODEL = re.compile(r"[\w.]+(\.py)?:\S+")  # torchvision:resnet50 and the like; other words name a file
_BATCH = re.compile(r"(?:--batch[-_]size|--b|-b|--mini-batch-size)[ =](\d{1,18})(?=\s|$)")


@dataclass
class FileValues:
    """What a file says: values by the names of `JobSpec`, the lines they are in, and what is not part of the job."""

    values: dict[str, Any]
    line_of: Callable[[str], int | None] = lambda name: None
    notes: list[str] = field(default_factory=list)
    summary: str | None = None  # a file that describes the model's layers
    dataset: str | None = None
    recorded: dict[str, int] = field(default_factory=dict)

    def set_policy(self, policy: Any, path: str, line: int | None) -> None:
        """`exclusive` and `collocation`; the listing, which names both, leaves it to the site."""
        words = re.findall(r"[a-z-]+", policy.lower()) if isinstance(policy, str) else []
        if words and set(words) <= {"exclusive", "collocation", "collocate", "collocated", "shared"}:
            self.values["exclusive"] = words == ["exclusive"]
            return
        where = f"{path}, line {line}" if line else path
        raise InvalidValue(
            f"{where}: needed the policy exclusive or collocation; found {str(policy)[:80]!r} "
            "(how shared GPUs are chosen is the site's choice: ullage serve --policy)"
        )


def read_rad(text: str, path: str) -> FileValues:
    """What the text of a `.rad` file says."""
    lines = [(number, _without_comment(line)) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line]
    places: dict[str, int] = {}
    found = FileValues({}, places.get)
    while lines and (environment := _environment(lines[0][1])):
        name, value = environment
        _put(found, places, name, value, lines.pop(0)[0], path)
    if not lines or _keyed(lines[0][1]):
        where = f"{path}, line {lines[0][0]}" if lines else path
        raise InvalidValue(f"{where}: needed the command to run after the environment; found none")
    number, command = lines.pop(0)
    _put(found, places, "command", command, number, path)
    if lines and _keyed(lines[0][1]):
        _read_keyed(found, places, lines, path)
    else:
        _read_positions(found, places, lines, path)
    _compare_batch_sizes(found, command)
    return found


def _without_comment(line: str) -> str:
    """`#` begins a comment at the line's beginning or after a blank, as in a shell, and not inside quotes."""
    quote = ""
    for place, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and line.find(letter, place + 1) != -1:
            quote = letter
        elif letter == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place].strip()
    return line.strip()


def _environment(line: str) -> tuple[str, str] | None:
    match = _CONDA.fullmatch(line)
    if match and not match[1].endswith("/activate"):
        return "conda", match[1]
    match = _VENV.fullmatch(line)
    return ("venv", match[1] or ".") if match else None


def _keyed(line: str) -> tuple[str, str] | None:
    match = _KEYED_TIGHT.fullmatch(line) or _KEYED.fullmatch(line)
    return (re.sub(r"[ -]", "_", match[1].strip().lower()), match[2].strip()) if match else None


def _read_keyed(found: FileValues, places: dict[str, int], lines: list[tuple[int, str]], path: str) -> None:
    for number, line in lines:
        keyed = _keyed(line)
        if keyed is None:
            raise InvalidValue(f"{path}, line {number}: needed a line such as 'gpus: 2'; found {line[:80]!r}")
        name, value = keyed
        if name not in KEYS:
            near = nearest(name, KEYS)
            advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(KEYS)}"
            raise InvalidValue(f"{path}, line {number}: there is no {name[:80]!r}; {advice}")
        if name == "policy":
            _put(found, places, "exclusive", None, number, path)
            found.set_policy(value, path, number)
        elif value:
            _put(found, places, name, value, number, path)


def _read_positions(found: FileValues, places: dict[str, int], lines: list[tuple[int, str]], path: str) -> None:
    if len(lines) > len(POSITIONS):
        number = lines[len(POSITIONS)][0]
        raise InvalidValue(
            f"{path}, line {number}: needed at most {len(POSITIONS)} lines after the command "
            f"({', '.join(POSITIONS)}); found {len(lines)}"
        )
    for name, (number, value) in zip(POSITIONS, lines, strict=False):
        if name == "policy":
            FileValues({}).set_policy(value, path, number)
            found.notes.append(f"policy {value!r} was not followed: in this form of .rad files the site decides")
        elif name in _FIGURES:
            found.recorded[name] = _mebibytes(value, name, path, number)
        else:
            _put(found, places, name, value, number, path)


def _put(found: FileValues, places: dict[str, int], name: str, value: Any, number: int, path: str) -> None:
    if name in places:
        raise InvalidValue(f"{path}, line {number}: {name} is there twice; it is in line {places[name]} too")
    places[name] = number
    if name == "dataset":
        found.dataset = value
    elif name == "model" and not _MODEL.fullmatch(value):
        found.summary = value
    else:
        found.values[name] = value


def _mebibytes(value: str, name: str, path: str, number: int) -> int:
    match = re.fullmatch(r"([0-9]{1,12})(\.[0-9]{1,30})?", value)
    if match is None:
        raise InvalidValue(f"{path}, line {number}: needed the figure {name} in MiB; found {value[:80]!r}")
    return round(float(value) * MIB)


def _compare_batch_sizes(found: FileValues, command: str) -> None:
    """Some published files give another batch size to the estimator than to the program."""
    match = _BATCH.search(command)
    said = str(found.values.get("batch_size", "")).strip()
    if match and said.isdigit() and int(match[1]) != int(said):
        found.notes.append(f"the file says batch size {said}, its command {match[1]}")


@dataclass(frozen=True)
class ParsedJobFile:
    """A job file that was read: the job, and what a `.rad` file says besides it."""

    spec: JobSpec
    notes: tuple[str, ...] = ()  # what whoever submits it should be told
    dataset: str | None = None
    recorded: Mapping[str, int] = field(default_factory=dict)  # memory measured, and what estimators had said, in bytes


def read_job(path: str | os.PathLike[str]) -> ParsedJobFile:
    """Read a job file, `.toml` or `.rad`. Paths in it that are not absolute are taken from the file's folder."""
    file = Path(path)
    readers = {".toml": _read_toml, ".rad": read_rad}
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise InvalidValue(f"needed a job file that ends in .toml or .rad; found {str(path)!r}")
    found = reader(_text(file), str(path))
    folder = file.absolute().parent
    if found.summary is not None:
        found.values.setdefault("model", str(folder / found.summary))
    return ParsedJobFile(_spec(found, str(path), folder), tuple(found.notes), found.dataset, found.recorded)


def _text(file: Path) -> str:
    try:
        if not file.is_file():
            found = "is a folder" if file.is_dir() else "is not there" if not file.exists() else "is no plain file"
            raise InvalidValue(f"needed a job file; {file} {found}")
        with file.open("rb") as source:
            content = source.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidValue):
            raise
        raise InvalidValue(f"the job file {str(file)!r} cannot be read: {error}") from None
    if len(content) > LARGEST_FILE:
        raise InvalidValue(f"needed a job file of at most {LARGEST_FILE >> 10} KiB; {file} is larger")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = f"{content[error.start]:#04x}"
        raise InvalidValue(f"{file}, line {line}: needed text in UTF-8; found the byte {byte}") from None


def _read_toml(text: str, path: str) -> FileValues:
    try:
        values = tomllib.loads(text)
    except (RecursionError, ValueError) as error:  # ValueError: TOMLDecodeError, numbers of thousands of digits
        last = text.rstrip().count("\n") + 1
        said = str(error)[:200].replace("at end of document", f"at the end, line {last}")
        raise InvalidValue(f"{path}: needed TOML; {said}") from None
    policy = values.pop("policy", None)
    found = FileValues(values, lambda name: _line_of(text, name))
    if policy is not None:
        found.set_policy(policy, path, _line_of(text, "policy"))
    return found


def _line_of(text: str, name: str) -> int | None:
    pattern = re.compile(rf"\s*(?:\[\s*)?[\"']?{re.escape(name)}[\"']?\s*[=\].]")
    return next((number for number, line in enumerate(text.split("\n"), 1) if pattern.match(line)), None)


def make_job(values: Mapping[str, Any], what: str) -> JobSpec:
    """A job from values by the names of a TOML file; `what` is how messages name them.

    >>> make_job({"command": ["python", "a.py"], "gpuss": 2}, "the job")
    Traceback (most recent call last):
    ...
    ullage.errors.InvalidValue: the job: there is no 'gpuss'; did you mean 'gpus'?
    """
    found = FileValues(dict(values))
    if found.values.get("policy") is not None:
        found.set_policy(found.values.pop("policy"), what, None)
    return _spec(found, what, Path.cwd())


def _spec(found: FileValues, path: str, folder: Path) -> JobSpec:
    values = dict(found.values)
    for name in ("cwd", "venv"):
        if isinstance(values.get(name), str | os.PathLike):
            values[name] = _absolute(os.fspath(values[name]), folder)
    try:
        return JobSpec.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
        line = found.line_of(str(first["loc"][0])) if first["loc"] else None
        raise InvalidValue(f"{path}{f', line {line}' if line else ''}: {first_problem(errors, JobSpec)}") from None


def _absolute(path: str, folder: Path) -> str:
    try:
        return os.path.normpath(folder / os.path.expanduser(path))
    except (ValueError, RuntimeError):
        return path  # with a NUL in it, which is refused below
