"""The options of sbatch and srun: which words are options, and what a job asks for with them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ullage.errors import InvalidValue
from ullage.slurm.commands import parse_gres

_SHORT = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "i": "input", "J": "job-name",
    "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks", "o": "output",
    "p": "partition", "q": "qos", "r": "relative", "S": "core-spec", "T": "threads", "t": "time", "w": "nodelist",
    "x": "exclude",
}  # fmt: skip
_SHORT_FLAGS = {
    "E": "preserve-env", "H": "hold", "h": "help", "K": "kill-on-bad-exit", "k": "no-kill", "l": "label",
    "O": "overcommit", "Q": "quiet", "s": "oversubscribe", "u": "unbuffered", "V": "version", "v": "verbose",
    "W": "wait", "X": "disable-status", "Z": "no-allocate",
}  # fmt: skip
# Those without a value, or with one only behind "=".
_FLAGS = set(_SHORT_FLAGS.values()) | {
    "async", "contiguous", "exact", "exclusive", "get-user-env", "ignore-pbs", "multi-prog", "nice",
    "no-requeue", "overlap", "parsable", "propagate", "pty", "quit-on-interrupt", "reboot", "requeue", "resv-ports",
    "spread-job", "test-only", "usage", "use-min-nodes", "compress", "immediate", "send-libs", "interactive",
}  # fmt: skip
GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")


@dataclass(frozen=True)
class SbatchWords:
    """What a command line of sbatch or srun says: options by their long names, and the words behind them."""

    values: Mapping[str, str] = field(default_factory=dict)
    rest: tuple[str, ...] = ()


def read_words(words: Sequence[str], srun: bool = False) -> SbatchWords:
    """Tell options, their values and the rest apart; what is given twice counts as given last.

    >>> read_words(["-n", "4", "-N2", "--hold", "--time", "1:00", "job.sh", "--lr", "1"])
    SbatchWords(values={'ntasks': '4', 'nodes': '2', 'hold': '', 'time': '1:00'}, rest=('job.sh', '--lr', '1'))
    """
    found: dict[str, str] = {}
    left = list(words)
    short = _SHORT | ({"W": "wait"} if srun else {})
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and name not in _FLAGS:
                value = _value(word, left)
            found[name] = value
            continue
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in short:
                found[short[letter]] = letters.removeprefix("=") or _value(f"-{letter}", left)
                break
            found[_SHORT_FLAGS.get(letter, letter)] = ""
    return SbatchWords(found, tuple(left))


def with_options(words: Sequence[str], added: Sequence[str]) -> list[str]:
    """A command line of sbatch with more options, which count more than those that it has.

    >>> with_options(["--gpus=1", "job.sh", "--lr", "1"], ["--gpus=0"])
    ['--gpus=1', '--gpus=0', 'job.sh', '--lr', '1']
    """
    rest = read_words(words).rest
    head = list(words[: len(words) - len(rest)])
    end = ["--"] if head[-1:] == ["--"] else []
    return [*head[: len(head) - len(end)], *added, *end, *rest]


def _value(option: str, left: list[str]) -> str:
    if not left:
        raise InvalidValue(f"{option}: needed a value; found the end of the line")
    return left.pop(0)


def read_directives(text: str) -> dict[str, str]:
    """The options in the `#SBATCH` lines of a batch script, which sbatch reads up to the first command.

    >>> read_directives("#!/bin/bash\\n#SBATCH -n 2 --gres=gpu:1  # one\\n\\necho\\n#SBATCH -n 3")
    {'ntasks': '2', 'gres': 'gpu:1'}
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#SBATCH"):
            try:
                found |= read_words(shlex.split(line.removeprefix("#SBATCH"), comments=True)).values
            except (ValueError, InvalidValue) as error:
                raise InvalidValue(f"line {number}: '{line.strip()}' cannot be read: {error}") from None
        elif line.strip() and not line.startswith("#"):
            break
    return found


@dataclass(frozen=True)
class GpuRequest:
    """The GPUs that a job asks for on each of its nodes, of which type, and how many nodes; or shards by itself."""

    per_node: int | None = None
    type: str | None = None
    nodes: int = 1
    shards: int | None = None
    options: tuple[str, ...] = ()  # of sbatch that say so


def gpu_request(values: Mapping[str, str]) -> GpuRequest:
    """What the options of a job say about GPUs; `per_node` is `None` where they say nothing.

    >>> gpu_request({"gpus": "a100:4", "nodes": "2"})
    GpuRequest(per_node=2, type='a100', nodes=2, shards=None, options=('gpus',))
    >>> gpu_request({"gres": "gpu:1"}).per_node, gpu_request({"gres": "shard:12"}).shards
    (1, 12)
    """
    tasks, nodes = tasks_and_nodes(values)
    on_node = -(-tasks // nodes)
    gres = parse_gres(values.get("gres", ""))
    shards = next((each.count for each in gres if each.name == "shard"), None)
    per_node = sum(each.count for each in gres if each.name == "gpu") or None
    kinds = [each.type for each in gres if each.name in ("gpu", "shard") and each.type]
    factors = {"gpus": 1 / nodes, "gpus-per-node": 1.0, "gpus-per-task": float(on_node), "gpus-per-socket": 1.0}
    given = tuple(name for name in GPU_OPTIONS if values.get(name) not in (None, "", "0"))
    for name in given:
        count, kind = _count_and_type(values[name])
        kinds += [kind] if kind else []
        per_node = max(per_node or 0, -int(-count * factors[name] // 1))
    if not gres and not given:
        return GpuRequest(nodes=nodes)
    return GpuRequest(per_node, kinds[0] if kinds else None, nodes, shards, given)


def tasks_and_nodes(values: Mapping[str, str]) -> tuple[int, int]:
    """How many tasks a job or a step has in all, and on how many nodes.

    >>> tasks_and_nodes({"nodes": "2", "ntasks-per-node": "4"}), tasks_and_nodes({"ntasks": "3"}), tasks_and_nodes({})
    ((8, 2), (3, 1), (1, 1))
    """
    nodes = max(1, _first_number(values.get("nodes")) or 1)
    on_node = _first_number(values.get("ntasks-per-node")) or 1
    return max(1, _first_number(values.get("ntasks")) or on_node * nodes), nodes


def _first_number(text: str | None) -> int | None:
    """Of `4`, `2-8` or `4K`."""
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else None


def _count_and_type(text: str) -> tuple[int, str | None]:
    """`2`, `a100:2`, or several with commas."""
    found = parse_gres(",".join(f"gpu:{part}" for part in text.split(",")))
    return sum(each.count for each in found), next((each.type for each in found if each.type), None)


def first_index(array: str) -> int | None:
    """The first index of `--array`.

    >>> first_index("3-9%2"), first_index("5,7"), first_index("x")
    (3, 5, None)
    """
    return _first_number(array)
