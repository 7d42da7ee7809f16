"""Jobs for the daemon (`JobSpec`), and job files: TOML, and `.rad` files of RAD-RM."""

import math
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from ullage.errors import InvalidValue, MissingPackage, nearest
from ullage.text import plain

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
        START_FORMS,
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


# The patterns in the path of an output, and their values.
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

_DAEMON = "set by the daemon"
_ARRAY = "Submit a job per index: 1-20, 0-10:2 or 1,5,7; %8 runs 8 at a time. {index} in the command is the index."
_AFTER = "Start after job 17 succeeds (17) or ends (any:17); also 12_3, 12_all, 12_{index} or a name. Can be repeated."
_OUTPUT = f"Write output to this file: {OUTPUT_HELP}."
_ON_END = "Run this command when the job ends; it reads the result as JSON from standard input."


class Option(NamedTuple):
    """The help of a field, and its form on the command line. `default` describes the default in words if the value does
    not; a flag takes no value, and `no` is its opposite."""

    help: str
    metavar: str = ""
    default: str | None = None
    letter: str = ""
    no: str = ""

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(schema), "description": self.help}


class JobSpec(BaseModel):
    """The request for a job, from a job file, `ullage submit`, `ullage.manager.Client` or the API.

    `None` means unset. Sizes are in bytes or text such as `12GiB`, times in seconds or text such as `90m`. `memory` is
    the promise to request on each GPU, in place of an estimate. `measured` is the true memory on each GPU, if known,
    which only the policies called oracles use.

    It does not check that the command, the GPUs and the jobs to wait for exist.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    command: list[_Text] = Field(min_length=1, max_length=MOST_WORDS)
    name: Annotated[_Name | None, Option("Name of the job.", "NAME", letter="N")] = None
    interactive: Annotated[
        bool, Option("Run at a terminal and connect to it. Without a command: your shell.", letter="i")
    ] = False
    gpus: Annotated[Int, Option("Number of GPUs; 0 for none.", "N")] = Field(1, ge=0, le=1024)
    memory: Annotated[Bytes | None, Option("GPU memory to promise on each GPU, such as 6GiB.", "SIZE", "estimated")] = (
        Field(None, gt=0, le=1 << 50)
    )
    cores: Annotated[Int | None, Option("Processor cores to promise.", "N", _DAEMON)] = Field(None, ge=1, le=1 << 16)
    host_memory: Annotated[
        Bytes | None, Option("Host memory to promise, also its limit, such as 32GiB.", "SIZE", _DAEMON)
    ] = Field(None, gt=0, le=1 << 60)
    exclusive: Annotated[bool, Option("Reserve whole GPUs for the job, or share them.", no="shared")] = False
    min_speed: Annotated[
        float | None, Option("Share a GPU only at this share of full speed, such as 0.8.", "SHARE", _DAEMON)
    ] = Field(None, ge=0, le=1)
    measured: Bytes | None = Field(None, gt=0, le=1 << 50)
    model: Annotated[
        _Text | None, Option("Estimate this model instead of the script, such as torchvision:resnet50.", "SOURCE")
    ] = None
    batch_size: Annotated[Int | None, Option("With --model: samples in a batch.", "N", letter="b")] = Field(
        None, ge=1, le=1 << 40
    )
    sequence_length: Annotated[Int | None, Option("With --model: tokens in a sequence.", "N")] = Field(
        None, ge=1, le=1 << 40
    )
    estimate: dict[_Text, Any] = {}
    recorded: dict[_Name, Annotated[Bytes, Field(gt=0, le=1 << 50)]] = {}
    estimator: Annotated[
        _Name | None, Option("Estimator, such as ullage, horus or none.", "NAME", "the daemon's", letter="e")
    ] = None
    array: Annotated[list[int] | None, Option(_ARRAY, "INDICES")] = Field(None, min_length=1, max_length=LONGEST_ARRAY)
    throttle: Annotated[Int | None, Option("Maximum number of array jobs that run at once.", "N")] = Field(
        None, ge=1, le=LONGEST_ARRAY
    )
    after: Annotated[list[Dependency], Option(_AFTER, "JOB")] = Field([], max_length=MOST_DEPENDENCIES)
    begin: Annotated[StartTime | None, Option(f"Earliest start: {START_FORMS}.", "TIME")] = None
    priority: Annotated[Int, Option("Jobs with a higher priority start first.", "N")] = Field(0, ge=-1000, le=1000)
    hold: Annotated[bool, Option("Do not start before 'ullage edit --release'.")] = False
    time_limit: Annotated[
        Seconds | None, Option("Stop the job after this long, such as 90m or 12h.", "TIME", letter="t")
    ] = Field(None, gt=0, le=3.2e9)
    retries: Annotated[Int, Option("Maximum number of retries if the job fails.", "N")] = Field(0, ge=0, le=1000)
    requeue: Annotated[bool, Option("Allow another start after a failure, or start once only.", no="no-requeue")] = True
    cwd: Annotated[
        _Text | None, Option("Run in this folder.", "FOLDER", "this folder, or the job file's", letter="C")
    ] = None
    venv: Annotated[_Text | None, Option("Run in this virtual environment.", "FOLDER")] = None
    conda: Annotated[_Text | None, Option("Run in this conda environment.", "NAME")] = None
    env: dict[_Text, _Value] = {}
    output: Annotated[_Text | None, Option(_OUTPUT, "FILE", letter="o")] = None
    error: Annotated[_Text | None, Option("Write standard error to this file.", "FILE", "the file of --output")] = None
    resumable: Annotated[bool, Option("The job saves a checkpoint on SIGUSR1 and can resume.")] = False
    checkpoint_signal: Literal["USR1", "USR2", "TERM", "INT", "HUP"] | None = None
    checkpoint_lead: Seconds | None = Field(None, ge=0, le=3.2e9)
    mps_threads: Annotated[Int | None, Option("With MPS: percentage of the GPU's threads.", "PERCENT")] = Field(
        None, ge=1, le=100
    )
    mps_memory: Annotated[Bytes | None, Option("With MPS: limit of the job's GPU memory.", "SIZE")] = Field(
        None, gt=0, le=1 << 50
    )
    on_end: Annotated[list[_Text] | None, Option(_ON_END, "COMMAND")] = Field(None, min_length=1, max_length=MOST_WORDS)
    umask: Int = Field(0o022, ge=0, le=0o777)

    @field_validator("command", "on_end", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Split a command in one string as a shell would, without running a shell."""
        if not isinstance(value, str):
            return value
        try:
            return shlex.split(value)
        except ValueError as error:
            raise ValueError(f"quotes in a command must match, got {value[:80]!r} ({error})") from None

    @field_validator("command")
    @classmethod
    def _not_empty(cls, words: list[str]) -> list[str]:
        if not words[0] or sum(map(len, words)) > LONGEST_COMMAND:
            raise ValueError(f"value must be a program and its arguments, at most {LONGEST_COMMAND} characters")
        return words

    @field_validator("cwd", "venv")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        if path is not None and not os.path.isabs(path):
            raise ValueError(f"path must be absolute, got {path[:80]!r}")
        return path

    @field_validator("output", "error")
    @classmethod
    def _patterns(cls, path: str | None) -> str | None:
        for match in re.finditer(r"%(.?)", path or ""):
            if match[1] not in OUTPUT_PATTERNS:
                raise ValueError(
                    f"pattern in a path must be one of {OUTPUT_HELP}, got {match[0]!r} in {str(path)[:80]!r}"
                )
        return path

    @field_validator("env", mode="before")
    @classmethod
    def _numbers_as_text(cls, value: Any) -> Any:
        """Accept numbers without quotes."""
        if not isinstance(value, dict):
            return value
        return {name: str(each) if type(each) in (int, float) else each for name, each in value.items()}

    @field_validator("env")
    @classmethod
    def _variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not name or "=" in name:
                raise ValueError(f"names of variables must not be empty or contain =, got {name[:80]!r}")
        if sum(len(name) + len(value) for name, value in env.items()) > LARGEST_ENVIRONMENT:
            raise ValueError(f"environment must have at most {LARGEST_ENVIRONMENT} characters")
        return env

    @model_validator(mode="before")
    @classmethod
    def _array_and_throttle(cls, values: Any) -> Any:
        """Split `array = "1-1000%8"` into the indices and the throttle."""
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
            raise ValueError(f"indices must be different numbers from 0 to {LARGEST_INDEX}")
        return array

    @field_validator("after", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [value]

    @model_validator(mode="after")
    def _consistent(self) -> "JobSpec":
        others = ("array", "output", "error", "retries", "resumable") if self.interactive else ()
        if conflicts := [name for name in others if getattr(self, name)]:
            raise ValueError(f"interactive: a job at a terminal cannot have {conflicts[0]} too")
        if self.venv and self.conda:
            raise ValueError("environment must be a venv or a conda environment, got both")
        if self.throttle is not None and self.array is None:
            raise ValueError("throttle: the job has no array to limit")
        if not self.requeue and (self.retries or self.resumable):
            other = "retries" if self.retries else "resumable"
            raise ValueError(f"requeue: a job that is never started twice cannot have {other} too")
        if self.gpus == 0 and (self.memory is not None or self.exclusive):
            option = "exclusive" if self.memory is None else "memory"
            raise ValueError(f"gpus must be 1 or more for {option}, got 0")
        return self

    @property
    def title(self) -> str:
        """Return the name, or that of the script or program in the command."""
        if self.name:
            return self.name
        script = next((word for word in self.command[1:] if word.endswith(".py")), self.command[0])
        return plain(os.path.basename(script))[:128] or "job"

    @property
    def folder(self) -> str:
        """Return the folder to run in. A job file may omit it; the submitting client sets it."""
        if self.cwd is None:
            raise InvalidValue("the job must have a cwd, the folder to run in, got none")
        return self.cwd

    def to_dict(self) -> dict[str, Any]:
        """Return the given values, ready for JSON."""
        values = self.model_dump(mode="json", exclude_unset=True)
        if self.after:
            values["after"] = [each.model_dump() for each in self.after]
        return values

    def with_changes(self, **changes: Any) -> "JobSpec":
        """Return the job with other values for some fields, checked in the same way."""
        return make_job({**self.to_dict(), **changes}, "the job")


# The fields of a waiting job that can be changed.
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

# `.rad` files are the job files of RAD-RM (dissertation, listing 6.1): an environment (`conda activate NAME`), the
# command, then entries in one of two forms. The keyed form, of the listing, has lines such as `model: resnet.txt` and
# `policy: exclusive`. The positional form, which RAD-RM's code reads, has one value per line: those of `POSITIONS`. Its
# last four, in MiB, are the measured memory, for oracles, and three estimates. RAD-RM promises the one of its
# estimator; so does Ullage's daemon (`recorded`).
#
# RAD-RM's code ignores the policy of the positional form: every published file says `exclusive` but is placed by the
# site's policy. So Ullage ignores it, too, with a note. In the keyed form, the policy applies.

POSITIONS = ("model", "dataset", "batch_size", "policy", "gpus", "measured", "horus", "faketensor", "gpumemnet")
_RECORDED = POSITIONS[6:]
_NOT_KEYED = ("command", "env", "estimate", "recorded", "exclusive", "mps_threads", "mps_memory", "umask", "output")
_NOT_IN_RAD = (*_NOT_KEYED, "error", "interactive")
KEYS = ("policy", "dataset", *(name for name in JobSpec.model_fields if name not in _NOT_IN_RAD))
_KEYED = re.compile(r"([A-Za-z_][A-Za-z_ -]*?)\s*:(\s.*|)", re.DOTALL)
_KEYED_TIGHT = re.compile(rf"({'|'.join(KEYS)}):(.*)", re.IGNORECASE | re.DOTALL)
_CONDA = re.compile(r"(?:conda|mamba|micromamba|source)\s+activate\s+(\S+)")
_VENV = re.compile(r"(?:source|\.)\s+(\S*?)/?(?:bin/)?activate")
_MODEL = re.compile(r"[\w.]+(\.py)?:\S+")  # such as torchvision:resnet50; other words name a file
_ARGUMENTS = {  # of a command, that tell what a summary of its model does not
    "batch_size": re.compile(r"(?:--batch[-_]size|--b|-b|--mini-batch-size)[ =](\d{1,18})(?=\s|$)"),
    "sequence_length": re.compile(
        r"--(?:(?:max[-_])?seq(?:uence)?[-_]?len(?:gth)?|max[-_]len(?:gth)?|block[-_]size)[ =](\d{1,18})(?=\s|$)"
    ),
}


@dataclass
class FileValues:
    """The values of a file by the names of `JobSpec`, their line numbers, and notes for the submitter."""

    values: dict[str, Any]
    line_of: Callable[[str], int | None] = lambda name: None
    notes: list[str] = field(default_factory=list)


def _is_exclusive(policy: Any, where: str) -> bool:
    """Return whether the policy is `exclusive`, not `collocation`; both, as in the listing, count as not exclusive."""
    words = re.findall(r"[a-z-]+", policy.lower()) if isinstance(policy, str) else []
    if words and set(words) <= {"exclusive", "collocation", "collocate", "collocated", "shared"}:
        return words == ["exclusive"]
    raise InvalidValue(
        f"{where}: policy must be exclusive or collocation, got {str(policy)[:80]!r} "
        "(ullage serve --policy decides how shared GPUs are chosen)"
    )


def read_rad(text: str, path: str) -> FileValues:
    numbered = [(number, _without_comment(line)) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in numbered if line]
    entries = []
    while lines and (environment := _environment(lines[0][1])):
        entries.append((lines.pop(0)[0], *environment))
    if not lines or _keyed(lines[0][1]):
        where = f"{path}, line {lines[0][0]}" if lines else path
        raise InvalidValue(f"{where}: the command to run after the environment is missing")
    number, command = lines.pop(0)
    entries.append((number, "command", command))
    is_keyed = bool(lines and _keyed(lines[0][1]))
    entries += _keyed_entries(lines, path) if is_keyed else _positional_entries(lines, path)
    rad_file = _values_of(entries, is_keyed, path)
    for name, pattern in _ARGUMENTS.items():
        _compare(rad_file, name, pattern.search(command))
    return rad_file


def _without_comment(line: str) -> str:
    """Remove a comment: `#` at the beginning of the line or after a blank, as in a shell, but not inside quotes."""
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


def _keyed_entries(lines: list[tuple[int, str]], path: str) -> Iterator[tuple[int, str, str]]:
    for number, line in lines:
        keyed = _keyed(line)
        if keyed is None:
            raise InvalidValue(f"{path}, line {number}: line must look like 'gpus: 2', got {line[:80]!r}")
        name, value = keyed
        if name not in KEYS:
            near = nearest(name, KEYS)
            advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(KEYS)}"
            raise InvalidValue(f"{path}, line {number}: there is no {name[:80]!r}; {advice}")
        if value or name == "policy":
            yield number, name, value


def _positional_entries(lines: list[tuple[int, str]], path: str) -> Iterator[tuple[int, str, str]]:
    if len(lines) > len(POSITIONS):
        raise InvalidValue(
            f"{path}, line {lines[len(POSITIONS)][0]}: at most {len(POSITIONS)} lines can follow the command "
            f"({', '.join(POSITIONS)}), got {len(lines)}"
        )
    return ((number, name, value) for name, (number, value) in zip(POSITIONS, lines, strict=False))


def _values_of(entries: Iterable[tuple[int, str, str]], is_keyed: bool, path: str) -> FileValues:
    """Collect the values of entries; refuse a name that is there twice."""
    places: dict[str, int] = {}
    rad_file = FileValues({}, places.get)
    for number, name, value in entries:
        if name in places:
            raise InvalidValue(f"{path}, line {number}: {name} is there twice; it is in line {places[name]} too")
        places[name] = number
        if name == "policy":
            exclusive = _is_exclusive(value, f"{path}, line {number}")
            if is_keyed:
                rad_file.values["exclusive"] = exclusive
            else:
                rad_file.notes.append(f"policy {value!r} was not followed: in this form of .rad files the site decides")
        elif name == "model" and not _MODEL.fullmatch(value):
            rad_file.values[name] = str(Path(path).absolute().parent / value)  # a file that describes the layers
        elif name in _RECORDED:
            recorded = rad_file.values.setdefault("recorded", {})
            recorded[name] = _mib(name, value, f"{path}, line {number}")
        elif name == "measured" and not is_keyed:
            if value != "0":  # which stands for a figure that nobody has measured
                rad_file.values[name] = _mib(name, value, f"{path}, line {number}")
        elif name != "dataset":
            rad_file.values[name] = value
    return rad_file


def _mib(name: str, value: str, where: str) -> int:
    """Return a figure in MiB as bytes, without the part of a MiB, as RAD-RM reads it."""
    try:
        size = float(value)
    except ValueError:
        size = math.nan
    if not 0 < size <= 1 << 30:
        raise InvalidValue(f"{where}: {name} must be memory in MiB such as 8000, got {value[:80]!r}")
    return max(int(size), 1) << 20


def _compare(rad_file: FileValues, name: str, match: re.Match[str] | None) -> None:
    """Take a value for the estimator from the command, or note that the file has another one, as some published do."""
    given = str(rad_file.values.get(name, "")).strip()
    if match and not given and os.path.isabs(str(rad_file.values.get("model", ""))):
        rad_file.values[name] = match[1]
    elif match and given.isdecimal() and int(match[1]) != int(given):
        rad_file.notes.append(f"the file says {name.replace('_', ' ')} {given}, its command {match[1]}")


@dataclass(frozen=True)
class ParsedJobFile:
    """A job from a file, and notes for its submitter."""

    spec: JobSpec
    notes: tuple[str, ...] = ()


def read_job(path: str | os.PathLike[str]) -> ParsedJobFile:
    """Read a job file, `.toml` or `.rad`. Relative paths in it are relative to the file's folder."""
    file = Path(path)
    reader = {".toml": _read_toml, ".rad": read_rad}.get(file.suffix.lower())
    if reader is None:
        raise InvalidValue(f"a job file must end in .toml or .rad, got {str(path)!r}")
    file_values = reader(_text(file), str(path))
    spec = _spec(file_values, str(path), file.absolute().parent)
    return ParsedJobFile(spec, tuple(file_values.notes))


def _text(file: Path) -> str:
    try:
        if not file.is_file():
            state = "is a folder" if file.is_dir() else "does not exist" if not file.exists() else "is not a plain file"
            raise InvalidValue(f"{file} must be a job file, but it {state}")
        with file.open("rb") as source:
            content = source.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidValue):
            raise
        raise InvalidValue(f"the job file {str(file)!r} cannot be read: {error}") from None
    if len(content) > LARGEST_FILE:
        raise InvalidValue(f"a job file must have at most {LARGEST_FILE >> 10} KiB, got more in {file}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = f"{content[error.start]:#04x}"
        raise InvalidValue(f"{file}, line {line}: text must be UTF-8, got the byte {byte}") from None


def _read_toml(text: str, path: str) -> FileValues:
    try:
        values = tomllib.loads(text)
    except (RecursionError, ValueError) as error:  # ValueError: TOMLDecodeError, numbers of thousands of digits
        last = text.rstrip().count("\n") + 1
        reason = str(error)[:200].replace("at end of document", f"at the end, line {last}")
        raise InvalidValue(f"{path} must be valid TOML: {reason}") from None
    if (policy := values.pop("policy", None)) is not None:
        line = _line_of(text, "policy")
        values["exclusive"] = _is_exclusive(policy, f"{path}, line {line}" if line else path)
    return FileValues(values, lambda name: _line_of(text, name))


def _line_of(text: str, name: str) -> int | None:
    pattern = re.compile(rf"\s*(?:\[\s*)?[\"']?{re.escape(name)}[\"']?\s*[=\].]")
    return next((number for number, line in enumerate(text.split("\n"), 1) if pattern.match(line)), None)


def make_job(values: Mapping[str, Any], what: str) -> JobSpec:
    """Make a job from values by the names of a TOML file; `what` names it in messages."""
    given = dict(values)
    if given.get("policy") is not None:
        given["exclusive"] = _is_exclusive(given.pop("policy"), what)
    return _spec(FileValues(given), what, Path.cwd())


def _spec(file_values: FileValues, path: str, folder: Path) -> JobSpec:
    values = dict(file_values.values)
    for name in ("cwd", "venv"):
        if isinstance(values.get(name), str | os.PathLike):
            values[name] = _absolute(os.fspath(values[name]), folder)
    try:
        return JobSpec.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
        line = file_values.line_of(str(first["loc"][0])) if first["loc"] else None
        raise InvalidValue(f"{path}{f', line {line}' if line else ''}: {first_problem(errors, JobSpec)}") from None


def _absolute(path: str, folder: Path) -> str:
    try:
        return os.path.normpath(folder / os.path.expanduser(path))
    except (ValueError, RuntimeError):
        return path  # it contains a NUL, which is refused later
