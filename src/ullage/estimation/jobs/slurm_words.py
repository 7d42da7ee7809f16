"""Command lines of sbatch and srun: their options, values and remaining words."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ullage.errors import InvalidValue


def _options(letters: str) -> dict[str, str]:
    return dict(re.findall(r"(\w)=(\S+)", letters))


_SHORT = _options(
    "A=account a=array B=extra-node-info b=begin C=constraint c=cpus-per-task D=chdir d=dependency e=error F=nodefile "
    "G=gpus i=input J=job-name L=licenses M=clusters m=distribution N=nodes n=ntasks o=output p=partition q=qos "
    "r=relative S=core-spec T=threads t=time w=nodelist x=exclude"
)
_SHORT_FLAGS = _options(
    "E=preserve-env H=hold h=help K=kill-on-bad-exit k=no-kill l=label O=overcommit Q=quiet s=oversubscribe "
    "u=unbuffered V=version v=verbose W=wait X=disable-status Z=no-allocate"
)
# Options without a value, or with one only after "=".
_FLAG = re.compile(
    "async|contiguous|exact|exclusive|get-user-env|ignore-pbs|multi-prog|nice|no-requeue|overlap|parsable|propagate|pty|"
    "quit-on-interrupt|reboot|requeue|resv-ports|spread-job|test-only|usage|use-min-nodes|compress|immediate|send-libs|"
    f"interactive|{'|'.join(_SHORT_FLAGS.values())}"
)


@dataclass(frozen=True)
class SbatchWords:
    """A command line of sbatch or srun: options by their long names, and the words after them."""

    values: Mapping[str, str] = field(default_factory=dict)
    rest: tuple[str, ...] = ()


def read_words(words: Sequence[str], srun: bool = False) -> SbatchWords:
    """Separate options, their values and the rest; of a repeated option, the last value counts.

    >>> read_words(["-n", "4", "-N2", "--hold", "--time", "1:00", "job.sh", "--lr", "1"])
    SbatchWords(values={'ntasks': '4', 'nodes': '2', 'hold': '', 'time': '1:00'}, rest=('job.sh', '--lr', '1'))
    """
    values: dict[str, str] = {}
    left = list(words)
    short = _SHORT | ({"W": "wait"} if srun else {})
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and not _FLAG.fullmatch(name):
                value = _value(word, left)
            values[name] = value
            continue
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in short:
                values[short[letter]] = letters.removeprefix("=") or _value(f"-{letter}", left)
                break
            values[_SHORT_FLAGS.get(letter, letter)] = ""
    return SbatchWords(values, tuple(left))


def _value(option: str, left: list[str]) -> str:
    if not left:
        raise InvalidValue(f"{option} must have a value, got the end of the line")
    return left.pop(0)


def tasks_and_nodes(values: Mapping[str, str]) -> tuple[int, int]:
    """Return the total tasks of a job or a step, and its nodes."""
    nodes = max(1, first_number(values.get("nodes")) or 1)
    on_node = first_number(values.get("ntasks-per-node")) or 1
    return max(1, first_number(values.get("ntasks")) or on_node * nodes), nodes


def first_number(text: str | None) -> int | None:
    """Return the first number of `4`, `2-8` or `4K`."""
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else None
