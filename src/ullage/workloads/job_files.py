"""Job files: what to run and what it needs, as TOML or as a `.rad` file (`rad_files.py`); checked before it is used."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from ullage.errors import InvalidValue, nearest
from ullage.units import MIB, parse_bytes, parse_duration

# `.rad` files, the job files of RAD-RM (dissertation, listing 6.1).
#
# Two forms are in use. The keyed one, of the listing: an environment (`conda activate NAME`), the command, then lines
# such as `model: resnet.txt`, `batch_size: 128`, `policy: exclusive`, `gpus: 2`. The positional one, which RAD-RM's
# code reads: the same two lines, then model summary, data set, batch size, policy and number of GPUs, each on a line
# of its own, and in most files four figures in MiB more: memory measured, and the estimates of Horus, FakeTensor and
# GPUMemNet.
#
# RAD-RM's code never looks at the policy of the positional form (every published file says `exclusive`, and is placed
# by the site's policy), so neither is it followed here; a note says so. In the keyed form it is.

POSITIONS = ("model", "dataset", "batch_size", "policy", "gpus", "measured", "horus", "faketensor", "gpumemnet")
KEYS = (
    "model", "batch_size", "policy", "gpus", "dataset", "memory", "name", "cwd", "venv", "conda", "priority",
    "time_limit", "array", "after", "estimator", "host_memory", "resumable", "hold", "checkpoint_signal",
    "checkpoint_lead",
)  # fmt: skip
_FIGURES = POSITIONS[5:]
_KEYED = re.compile(r"([A-Za-z_][A-Za-z_ -]*?)\s*:(\s.*|)", re.DOTALL)
_KEYED_TIGHT = re.compile(rf"({'|'.join(KEYS)}):(.*)", re.IGNORECASE | re.DOTALL)
_CONDA = re.compile(r"(?:conda|mamba|micromamba|source)\s+activate\s+(\S+)")
_VENV = re.compile(r"(?:source|\.)\s+(\S*?)/?(?:bin/)?activate")
_MODEL = re.compile(r"[\w.]+(\.py)?:\S+")  # torchvision:resnet50 and the like; other words name a file
_BATCH = re.compile(r"(?:--batch[-_]size|--b|-b|--mini-batch-size)[ =](\d{1,18})(?=\s|$)")


@dataclass
class Found:
    """What a file says, by the names of `JobFile`, and where it says so."""

    values: dict[str, Any]
    line_of: Callable[[str], int | None] = lambda name: None
    notes: list[str] = field(default_factory=list)

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


def read_rad(text: str, path: str) -> Found:
    """What the text of a `.rad` file says.

    >>> read_rad("conda activate tf\\npython resnet.py --b 128 # to execute\\nbatch_size: 128", "job.rad").values
    {'conda': 'tf', 'command': 'python resnet.py --b 128', 'batch_size': '128'}
    """
    lines = [(number, _without_comment(line)) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line]
    places: dict[str, int] = {}
    found = Found({}, places.get)
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
    if found.notes:
        found.values["notes"] = tuple(found.notes)
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


def _read_keyed(found: Found, places: dict[str, int], lines: list[tuple[int, str]], path: str) -> None:
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


def _read_positions(found: Found, places: dict[str, int], lines: list[tuple[int, str]], path: str) -> None:
    if len(lines) > len(POSITIONS):
        number = lines[len(POSITIONS)][0]
        raise InvalidValue(
            f"{path}, line {number}: needed at most {len(POSITIONS)} lines after the command "
            f"({', '.join(POSITIONS)}); found {len(lines)}"
        )
    figures: dict[str, int] = {}
    for name, (number, value) in zip(POSITIONS, lines, strict=False):
        if name == "policy":
            Found({}).set_policy(value, path, number)
            found.notes.append(f"policy {value!r} was not followed: in this form of .rad files the site decides")
        elif name in _FIGURES:
            figures[name] = _mebibytes(value, name, path, number)
        else:
            _put(found, places, name, value, number, path)
    if figures:
        found.values["recorded"] = figures


def _put(found: Found, places: dict[str, int], name: str, value: Any, number: int, path: str) -> None:
    if name in places:
        raise InvalidValue(f"{path}, line {number}: {name} is there twice; it is in line {places[name]} too")
    places[name] = number
    found.values["summary" if name == "model" and not _MODEL.fullmatch(value) else name] = value


def _mebibytes(value: str, name: str, path: str, number: int) -> int:
    match = re.fullmatch(r"([0-9]{1,12})(\.[0-9]{1,30})?", value)
    if match is None:
        raise InvalidValue(f"{path}, line {number}: needed the figure {name} in MiB; found {value[:80]!r}")
    return round(float(value) * MIB)


def _compare_batch_sizes(found: Found, command: str) -> None:
    """Some published files give another batch size to the estimator than to the program."""
    match = _BATCH.search(command)
    said = str(found.values.get("batch_size", "")).strip()
    if match and said.isdigit() and int(match[1]) != int(said):
        found.notes.append(f"the file says batch size {said}, its command {match[1]}")


LARGEST_FILE = 256 << 10  # bytes
MOST_WORDS, LONGEST_COMMAND, LONGEST_ARRAY, MOST_DEPENDENCIES = 4096, 128 << 10, 10_000, 1000
LARGEST_INDEX = 10**9
_NOT_ASKED_FOR = {"notes", "recorded", "summary", "dataset"}  # what only `.rad` files and their reader say

_Text = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00]*$")]
_Word = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]
_Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"needed a number; found {str(value).lower()}")
    return value


_Int = Annotated[int, BeforeValidator(_number)]
_Bytes = Annotated[_Int, BeforeValidator(lambda value: parse_bytes(value) if isinstance(value, str) else value)]
_Seconds = Annotated[float, BeforeValidator(lambda value: parse_duration(value) if isinstance(value, str) else value)]


class JobFile(BaseModel):
    """A job as its file describes it; `None` is: not said. Memory in bytes, times in seconds.

    >>> JobFile(command="python train.py --lr 1e-4", memory="12GiB", array="1-3").array
    [1, 2, 3]

    Not covered: whether the command exists, the GPUs are there or the jobs to wait for are known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: list[_Word] = Field(min_length=1, max_length=MOST_WORDS)
    name: _Name | None = None
    cwd: _Text | None = None
    env: dict[_Word, _Word] = {}
    venv: _Text | None = None
    conda: _Text | None = None
    gpus: _Int = Field(1, ge=1, le=1024)
    memory: _Bytes | None = Field(None, gt=0, le=1 << 50)
    host_memory: _Bytes | None = Field(None, gt=0, le=1 << 60)
    model: _Text | None = None
    batch_size: _Int | None = Field(None, ge=1, le=1 << 40)
    estimate: dict[_Text, str | bool | int | float] = {}
    estimator: _Name | None = None
    exclusive: bool = False
    priority: _Int = Field(0, ge=-1000, le=1000)
    time_limit: _Seconds | None = Field(None, gt=0, le=3.2e9)
    resumable: bool = False
    checkpoint_signal: Literal["USR1", "USR2", "TERM", "INT", "HUP"] | None = None
    checkpoint_lead: _Seconds | None = Field(None, ge=0, le=3.2e9)
    array: list[int] | None = Field(None, min_length=1, max_length=LONGEST_ARRAY)
    after: list[str] = Field([], max_length=MOST_DEPENDENCIES)
    hold: bool = False
    mps_threads: _Int | None = Field(None, ge=1, le=100)
    mps_memory: _Bytes | None = Field(None, gt=0, le=1 << 50)
    dataset: _Text | None = None
    summary: _Text | None = None  # of `.rad` files: a file that describes the model's layers
    recorded: dict[str, int] = {}  # of `.rad` files: memory measured, and what estimators had said
    notes: tuple[str, ...] = ()  # what whoever submits it should be told

    @field_validator("command", mode="before")
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

    @field_validator("env", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """Numbers may be written without quotes."""
        if not isinstance(value, dict):
            return value
        plain = {name: str(v) if type(v) in (int, float) else v for name, v in value.items()}
        if any(not name or "=" in name for name in plain):
            raise ValueError("needed names of variables, without =")
        return plain

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
    def _jobs(cls, value: Any) -> Any:
        values = value if isinstance(value, list) else [value]
        return [_dependency(each) for each in values]

    def submission(self) -> dict[str, Any]:
        """What was said, in the names of the manager's submissions; what was not said is left out."""
        said = self.model_dump(exclude_unset=True, exclude={*_NOT_ASKED_FOR, "after", "estimate"})
        if self.after:
            said["after"] = [dict(zip(("kind", "job"), _parts(each), strict=True)) for each in self.after]
        if self.estimate:
            said["estimate_options"] = dict(self.estimate)
        return said


def parse_array(text: str) -> list[int]:
    """The indices of `1-20`, `0-10:2` or `1,5,7`.

    >>> parse_array("1-3,10-20:5")
    [1, 2, 3, 10, 15, 20]
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,10})(?:-([0-9]{1,10})(?::([0-9]{1,10}))?)?\s*", part)
        step = int(match[3] or 1) if match else 0
        if match is None or step < 1 or match[2] and int(match[2]) < int(match[1]):
            raise InvalidValue(f"needed indices such as 1-20, 0-10:2 or 1,5,7; found {text[:80]!r}")
        found += range(int(match[1]), int(match[2] or match[1]) + 1, step)[: LONGEST_ARRAY + 1]
        if len(found) > LONGEST_ARRAY:
            raise InvalidValue(f"needed at most {LONGEST_ARRAY} indices; found more in {text[:80]!r}")
    return found


def _dependency(value: Any) -> str:
    match = re.fullmatch(r"\s*(?:(ok|any):)?([0-9]{1,18})\s*", str(value)) if type(value) in (int, str) else None
    if match is None or int(match[2]) < 1:
        raise ValueError(f"needed numbers of jobs such as 17, ok:17 or any:17; found {str(value)[:80]!r}")
    return f"{match[1] or 'ok'}:{int(match[2])}"


def _parts(dependency: str) -> tuple[str, int]:
    kind, _, job = dependency.partition(":")
    return kind, int(job)


def read_job(path: str | os.PathLike[str]) -> JobFile:
    """A job file, `.toml` or `.rad`. Paths in it that are not absolute are taken from the file's folder.

    >>> read_job("job.toml")                                                               # doctest: +SKIP
    JobFile(command=['python', 'train.py'], ...)
    """
    file = Path(path)
    readers = {".toml": _read_toml, ".rad": read_rad}
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise InvalidValue(f"needed a job file that ends in .toml or .rad; found {str(path)!r}")
    text = _text(file)
    return _job(reader(text, str(path)), str(path), file.absolute().parent)


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


def _read_toml(text: str, path: str) -> Found:
    try:
        values = tomllib.loads(text)
    except (RecursionError, ValueError) as error:  # ValueError: TOMLDecodeError, numbers of thousands of digits
        last = text.rstrip().count("\n") + 1
        said = str(error)[:200].replace("at end of document", f"at the end, line {last}")
        raise InvalidValue(f"{path}: needed TOML; {said}") from None
    for name in _NOT_ASKED_FOR & set(values):
        raise InvalidValue(f"{path}, line {_line_of(text, name)}: there is no {name!r}")
    policy = values.pop("policy", None)
    found = Found(values, lambda name: _line_of(text, name))
    if policy is not None:
        found.set_policy(policy, path, _line_of(text, "policy"))
    return found


def _line_of(text: str, name: str) -> int | None:
    pattern = re.compile(rf"\s*(?:\[\s*)?[\"']?{re.escape(name)}[\"']?\s*[=\].]")
    return next((number for number, line in enumerate(text.split("\n"), 1) if pattern.match(line)), None)


def make_job(values: Mapping[str, Any], what: str) -> JobFile:
    """A job from values by the names of a TOML file; `what` is how messages name them.

    >>> make_job({"command": ["python", "a.py"], "gpuss": 2}, "the job")
    Traceback (most recent call last):
    ...
    ullage.errors.InvalidValue: the job: there is no 'gpuss'; did you mean 'gpus'?
    """
    found = Found(dict(values))
    if found.values.get("policy") is not None:
        found.set_policy(found.values.pop("policy"), what, None)
    return _job(found, what, Path.cwd())


def _job(found: Found, path: str, folder: Path) -> JobFile:
    values = dict(found.values)
    for name in ("cwd", "venv"):
        if isinstance(values.get(name), str):
            values[name] = _absolute(values[name], folder)
    try:
        job = JobFile.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        line = found.line_of(name)
        raise InvalidValue(f"{path}{f', line {line}' if line else ''}: {_said(first)}") from None
    if job.venv is not None and job.conda is not None:
        raise InvalidValue(f"{path}: needed a venv or a conda environment; found both")
    return job


def _absolute(path: str, folder: Path) -> str:
    try:
        return os.path.normpath(folder / os.path.expanduser(path))
    except (ValueError, RuntimeError):
        return path  # with a NUL in it, which is refused below


def _said(first: Mapping[str, Any]) -> str:
    """One thing that is wrong, in words."""
    place = ".".join(str(part)[:80] for part in first["loc"])
    if first["type"] == "extra_forbidden":
        near = nearest(str(first["loc"][0])[:80], set(JobFile.model_fields) - _NOT_ASKED_FOR)
        return f"there is no {place!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if first["type"] == "missing":
        return f"needed a {place}; found none"
    text = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{place}: {text}" if place else text
    found = repr(first["input"])
    return f"{place}: {text[:1].lower()}{text[1:]}; found {found if len(found) <= 80 else found[:77] + '...'}"
