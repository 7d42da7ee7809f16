"""A pseudo-terminal for a job, with a Unix socket for its owner. Uses only the standard library, for the supervisor.

A frame is a letter, the length in four bytes, then the data. To the job: `d` input, `w` the window's size. From the
job: `d` output, `e` its end as JSON. A new client first gets the last output.
"""

import contextlib
import fcntl
import json
import os
import selectors
import socket
import struct
import termios
from collections.abc import Iterator
from typing import Any

from ullage.manager.running.output import OutputFile, OutputTaker

TYPED = PRINTED = b"d"
WINDOW, ENDED = b"w", b"e"
_HEAD = struct.Struct(">cI")
_LARGEST_FRAME, _REPLAYED, _MOST_BEHIND = 1 << 16, 1 << 13, 1 << 20  # bytes
_MOST_CLIENTS = 8


def frame(kind: bytes, data: bytes) -> bytes:
    """Return a frame as it is sent.

    >>> list(frames(bytearray(frame(TYPED, b"ls") + b"d")))
    [(b'd', b'ls')]
    """
    return _HEAD.pack(kind, len(data)) + data


def frames(arrived: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Remove and yield the complete frames of a buffer."""
    while len(arrived) >= _HEAD.size:
        kind, size = _HEAD.unpack_from(arrived)
        if size > _LARGEST_FRAME:
            raise ValueError("a frame that is too long")
        if len(arrived) < _HEAD.size + size:
            return
        data = bytes(arrived[_HEAD.size : _HEAD.size + size])
        del arrived[: _HEAD.size + size]
        yield kind, data


def window(rows: int, columns: int) -> bytes:
    return struct.pack(">HH", rows, columns)


class _Client:
    """A connection to the terminal, with its input and its unsent output."""

    def __init__(self, line: socket.socket) -> None:
        self.line, self.arrived, self.waiting = line, bytearray(), bytearray()


class Terminal(OutputTaker):
    """The supervisor's side of a terminal: the job's output goes to its log and to all clients."""

    def __init__(self, file: str, log: OutputFile, owner: tuple[int, int] | None) -> None:
        super().__init__()
        self._master, self.slave = os.openpty()
        self._file, self._log, self._owner = file, log, owner
        if owner is not None:
            os.fchown(self.slave, *owner)
        os.fchmod(self.slave, 0o620)
        os.set_blocking(self._master, False)
        self._resize(window(24, 80))
        self._listening = self._listen()
        self._end_pipe, self._wake = os.pipe()
        self._ended: bytes | None = None
        self._recent, self._typed = bytearray(), bytearray()
        self._clients: dict[int, _Client] = {}
        self._selector = selectors.DefaultSelector()
        for source in (self._master, self._listening, self._end_pipe):
            self._selector.register(source, selectors.EVENT_READ)

    def _listen(self) -> socket.socket:
        """Listen on a socket for the job's user and root only."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listening.bind(self._file)
        finally:
            os.umask(before)
        if self._owner is not None:
            os.chown(self._file, *self._owner, follow_symlinks=False)
        listening.listen(_MOST_CLIENTS)
        listening.setblocking(False)
        return listening

    def finish(self, ended: dict[str, Any]) -> None:
        """Note the end of the job; clients get the rest of its output, then its end."""
        self._ended = json.dumps(ended).encode()
        os.close(self._wake)

    def run(self) -> None:
        while self._ended is None:
            for key, events in self._selector.select():
                if key.fd == self._master:
                    if events & selectors.EVENT_WRITE:
                        self._type()
                    if events & selectors.EVENT_READ:
                        self._pass_on()
                elif key.fileobj is self._listening:
                    self._welcome()
                elif key.fd in self._clients:
                    self._serve(self._clients[key.fd], events)
        while self._pass_on():
            pass
        for client in list(self._clients.values()):
            client.waiting += frame(ENDED, self._ended)
            client.line.settimeout(1.0)
            with contextlib.suppress(OSError):
                client.line.sendall(client.waiting)
            client.line.close()
        with contextlib.suppress(OSError):
            os.unlink(self._file)
        self._log.close()

    def _pass_on(self) -> bool:
        """Copy output of the job to its log and its clients; return false if there was none."""
        try:
            data = os.read(self._master, _LARGEST_FRAME)
        except BlockingIOError:
            return False
        except OSError:  # no process has the terminal open any more
            data = b""
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._master)
            return False
        self._log.write(data)
        self._recent = (self._recent + data)[-_REPLAYED:]
        for client in list(self._clients.values()):
            self._send(client, frame(PRINTED, data))
        return True

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            line, _ = self._listening.accept()
            if len(self._clients) >= _MOST_CLIENTS:
                line.close()
                return
            line.setblocking(False)
            self._clients[line.fileno()] = client = _Client(line)
            self._selector.register(line, selectors.EVENT_READ)
            self._send(client, frame(PRINTED, bytes(self._recent)))

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(client, b"")
            if events & selectors.EVENT_READ:
                data = client.line.recv(_LARGEST_FRAME)
                if not data:
                    raise ConnectionResetError
                client.arrived += data
                for kind, content in frames(client.arrived):
                    self._obey(kind, content)
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._dismiss(client)

    def _obey(self, kind: bytes, content: bytes) -> None:
        if kind == WINDOW and len(content) == 4:
            self._resize(content)
        elif kind == TYPED:
            self._typed = (self._typed + content)[:_MOST_BEHIND]  # limits the input for a job that reads nothing
            self._type()

    def _type(self) -> None:
        """Write as much input as the terminal takes now."""
        with contextlib.suppress(OSError):
            while self._typed:
                del self._typed[: os.write(self._master, self._typed)]
        with contextlib.suppress(KeyError):
            more = selectors.EVENT_WRITE if self._typed else 0
            self._selector.modify(self._master, selectors.EVENT_READ | more)

    def _resize(self, size: bytes) -> None:
        rows, columns = struct.unpack(">HH", size)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _send(self, client: _Client, data: bytes) -> None:
        """Send as much as the client takes now; drop a client that stays far behind."""
        client.waiting += data
        try:
            del client.waiting[: client.line.send(client.waiting)]
        except BlockingIOError:
            pass
        except OSError:
            self._dismiss(client)
            return
        if len(client.waiting) > _MOST_BEHIND:
            self._dismiss(client)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.waiting else 0)
        self._selector.modify(client.line, wanted)

    def _dismiss(self, client: _Client) -> None:
        if self._clients.pop(client.line.fileno(), None) is not None:
            self._selector.unregister(client.line)
            client.line.close()
