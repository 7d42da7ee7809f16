"""The ends of a job's outputs, from its files or from copies that the epilog made on the node. A restarted job may
append to its files, so the end of the previous run is recognised by its last bytes."""

import contextlib
import json
import os
import re
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ullage.manager.slurm import commands
from ullage.manager.slurm.commands import SlurmJob

_TAIL = 1 << 16  # bytes
_MARK = 256  # bytes that identify a place in a file
ENDED = "ended"  # folder of the copies, below the epilog's folder


@dataclass(frozen=True)
class Stream:
    """The last bytes of a file, its size, and the time of the last write in seconds since 1970."""

    size: int
    tail: bytes
    changed: int

    def since(self, size: int, mark: bytes, started: int) -> bytes:
        """Return the output of a run that began at `started`, given the size and the last bytes of the file before it.

        >>> Stream(9, b"old error", 5).since(4, b"old ", 3)  # appended
        b'error'
        >>> Stream(9, b"new error", 5).since(4, b"old ", 3)  # begun anew
        b'new error'
        >>> Stream(4, b"old ", 2).since(4, b"old ", 3), Stream(4, b"old ", 5).since(4, b"old ", 3)  # nothing; the same
        (b'', b'old ')
        """
        cut = len(self.tail) - (self.size - size)
        if size > self.size or cut <= 0 or not mark.endswith(self.tail[max(0, cut - _MARK) : cut]):
            return self.tail
        return self.tail if size == self.size and self.changed >= started else self.tail[cut:]


def read_streams(job: SlurmJob, spool: Path | None = None) -> list[Stream]:
    """Return the ends of a job's outputs, standard error last."""
    files = [] if spool is None else sorted((spool / ENDED).glob(f"{job.id}.{job.restarts}.*"))
    streams = [stream for file in files if (stream := _ended_stream(file)) is not None]
    return streams or [stream for path in _paths(job) if (stream := _of_file(path)) is not None]


def forget_kept(spool: Path, jobs: Collection[int]) -> None:
    """Remove the epilog's copies of the outputs of these jobs."""
    names = {str(job) for job in jobs}
    for file in (spool / ENDED).glob("*.*"):
        if file.name.split(".")[0] in names:
            with contextlib.suppress(OSError):
                file.unlink()


def text_of(streams: Sequence[Stream], before: str | None = None, started: int = 0) -> str:
    """Return the text that a run has printed, given its start and the marks (`marks_of`) of the run before it."""
    marks = [(size, bytes.fromhex(mark)) for size, mark in json.loads(before or "[]")]
    parts = []
    for place, stream in enumerate(streams):
        new = stream.since(*marks[place], started) if place < len(marks) else stream.tail
        parts.append(new.decode(errors="replace"))
    return "\n".join(parts)


def marks_of(streams: Sequence[Stream]) -> str:
    """Return the marks of the ends of outputs, as JSON."""
    return json.dumps([(stream.size, stream.tail[-_MARK:].hex()) for stream in streams])


def _paths(job: SlurmJob) -> list[str]:
    """Return the output files, with the names that Slurm has filled in, standard error last."""
    shown = commands.run("scontrol", "--oneliner", "show", "job", str(job.id))
    matches = [re.search(rf" {name}=(.*?)(?= \w+=| *$)", shown, re.M) for name in ("StdOut", "StdErr")]
    return list(dict.fromkeys(match[1] for match in matches if match and match[1] != "/dev/null"))


def _of_file(path: str) -> Stream | None:
    """Return the end of a regular file; nothing else is read, since reading might never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        tail = os.pread(descriptor, _TAIL, max(0, status.st_size - _TAIL))
        return Stream(status.st_size, tail, int(status.st_mtime))
    finally:
        os.close(descriptor)


def _ended_stream(file: Path) -> Stream | None:
    """Return the end in a copy of the epilog: a line with the file's size and write time, then its last bytes."""
    try:
        line, _, tail = file.read_bytes()[: _TAIL + 64].partition(b"\n")
    except OSError:
        return None
    match = re.fullmatch(rb"(\d+) (\d+)", line)
    return Stream(int(match[1]), tail, int(match[2])) if match else None
