"""The output of a job on disk, in parts of limited size. Uses only the standard library, for the supervisor.

A stream `stdout` is in `stdout`, `stdout.67108864` and so on, named by the offset of their first byte. The first part
and the newest ones are kept.
"""

import contextlib
import fcntl
import os
import selectors
import stat
import threading
from typing import Any, NamedTuple

_CHUNK, _PIPE = 1 << 18, 1 << 20  # bytes read at once, and buffered in the pipe
_READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class OutputFile:
    """An output stream of at most `parts` files of `size` bytes. If the disk is full, bytes are dropped."""

    def __init__(self, file: str, size: int, parts: int, owner: tuple[int, int] | None = None) -> None:
        self._path, self._size, self._parts, self._owner = file, size, max(parts, 2), owner
        self._place = sum(os.path.getsize(name) for _, name in parts_of(file)[-1:])
        self._room = size - self._place
        self._newer: list[str] = []
        self._lost = 0
        self._file = self._open(file)

    def _open(self, name: str) -> int:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if self._owner is not None:
            os.fchown(file, *self._owner)
        return file

    def write(self, data: bytes) -> None:
        while data:
            if self._room <= 0:
                self._next_part()
            piece, data = data[: self._room], data[max(self._room, 0) :]
            try:
                done = os.write(self._file, piece)
            except OSError:
                self._lost += len(piece)
                continue
            self._place, self._room = self._place + done, self._room - done
            data = piece[done:] + data

    def _next_part(self) -> None:
        name = f"{self._path}.{self._place}"
        self._room = self._size
        try:
            file = self._open(name)
        except OSError:  # no room for another file: continue this one
            return
        os.close(self._file)
        self._file = file
        self._newer.append(name)
        while len(self._newer) >= self._parts:
            with contextlib.suppress(OSError):
                os.unlink(self._newer.pop(0))

    def close(self) -> None:
        """Close the stream, and note dropped bytes in it if there is room again."""
        if self._lost:
            self.write(f"\nullage: {self._lost} bytes of this output could not be written\n".encode())
        os.close(self._file)


class OutputTaker(threading.Thread):
    """The thread that reads a job's output."""

    def __init__(self) -> None:
        super().__init__(daemon=True)

    def finish(self, ended: dict[str, Any]) -> None:
        """Note that the job is over, with its exit code or signal; no process of it is left that could print."""


class OutputPump(OutputTaker):
    """Copies pipes into files until their writers are gone."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = selectors.DefaultSelector()
        self._files: list[OutputFile] = []

    def pipe_into(self, file: OutputFile, owner: tuple[int, int] | None = None) -> int:
        """Return the write end of a new pipe into the file."""
        source, sink = os.pipe()
        with contextlib.suppress(OSError):  # the user may have reached the system's limit
            fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, _PIPE)
        if owner is not None:
            os.fchown(sink, *owner)  # so that programs can open /dev/stdout
        self._selector.register(source, selectors.EVENT_READ, file)
        self._files.append(file)
        return sink

    def run(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                data = os.read(key.fd, _CHUNK)
                if data:
                    key.data.write(data)
                else:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
        for file in self._files:
            file.close()


def parts_of(file: str) -> list[tuple[int, str]]:
    """Return the present parts of a stream in order, with the offsets of their first bytes."""
    folder, name = os.path.split(file)
    parts = []
    with contextlib.suppress(OSError):
        for each in os.listdir(folder or "."):
            start = each.removeprefix(f"{name}.")
            if each == name or each != start and start.isdigit():
                parts.append((0 if each == name else int(start), os.path.join(folder, each)))
    return sorted(parts)


class Piece(NamedTuple):
    """Bytes of a stream, the offset of their end, and the number of missing bytes before them."""

    data: bytes
    end: int
    missing: int


def read_piece(file: str, offset: int, most: int) -> Piece:
    """Read at most `most` bytes from an offset on, or from the next byte that is still there."""
    data, begin = b"", offset
    for start, name in parts_of(file):
        if not data:
            begin = max(offset, start)
        elif start != begin + len(data):
            break  # the following bytes are gone
        data += _read(name, begin + len(data) - start, most - len(data))
        if len(data) == most:
            break
    return Piece(data, begin + len(data), begin - offset) if data else Piece(b"", offset, 0)


def end_of(file: str) -> int:
    return max((start + _length(name) for start, name in parts_of(file)), default=0)


def read_end(file: str, size: int) -> bytes:
    parts = parts_of(file)[-2:]
    return b"".join(_read(name, max(0, _length(name) - size), size) for _, name in parts)[-size:]


def _read(name: str, offset: int, most: int) -> bytes:
    try:
        descriptor = os.open(name, _READ_FLAGS)
    except OSError:
        return b""
    try:
        plain = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return os.pread(descriptor, most, offset) if plain else b""
    finally:
        os.close(descriptor)


def _length(name: str) -> int:
    try:
        return os.lstat(name).st_size
    except OSError:
        return 0
