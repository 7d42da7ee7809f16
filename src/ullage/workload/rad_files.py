"""`.rad` files, the job files of RAD-RM (dissertation, listing 6.1).

Two forms are in use. The keyed one, of the listing: an environment (`conda activate NAME`), the command, then lines
such as `model: resnet.txt`, `batch_size: 128`, `policy: exclusive`, `gpus: 2`. The positional one, which RAD-RM's code
reads: the same two lines, then model summary, data set, batch size, policy and number of GPUs, each on a line of its
own, and in most files four figures in MiB more: memory measured, and the estimates of Horus, FakeTensor and GPUMemNet.

RAD-RM's code never looks at the policy of the positional form (every published file says `exclusive`, and is placed by
the site's policy), so neither is it followed here; a note says so. In the keyed form it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ullage.errors import InvalidValue, nearest
from ullage.units import MIB

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
