"""Messages between parent and child: one JSON object a line, on a pipe that nothing else is written to.

The child sends `{"at": NAME}` when it waits for permission to continue, `{"so_far": {...}}` with a provisional answer,
and ends with `{"answer": {...}}` or `{"error": TEXT}`. Its guard sends `{"private": HOW}` when the sandbox is closed,
and `{"limit": [KIND, TEXT]}` when it has ended the child at a limit.
A line counts only with its newline, so an answer that was cut off by a kill does not count.
"""

import json
import os
import threading
from typing import Any, Literal, NamedTuple

from ullage.errors import InvalidValue, UllageError

_LONGEST_ERROR = 500

_KINDS = {"answer": dict, "so_far": dict, "error": str, "limit": list, "private": str, "at": str, "doing": str}

LimitKind = Literal["time", "memory", "answer", "processes", "written"]


class Exceeded(NamedTuple):
    """A limit that was exceeded, and a description that continues "the process"."""

    kind: LimitKind
    message: str


def encode(message: dict[str, Any]) -> bytes:
    try:
        return json.dumps(message).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"a message must consist of plain values (text, numbers, lists): {error}") from None


def error_text(error: BaseException) -> str:
    """Return an exception in one line; Ullage's own messages come without the name of the exception."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, UllageError) and first:
        return first[:_LONGEST_ERROR]
    return f"{type(error).__name__}: {first}"[:_LONGEST_ERROR].removesuffix(": ")


class Channel:
    """The child's end. Only the first answer counts, and only from the process that made the channel."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._descriptor, self._owner, self._lock = descriptor, os.getpid(), threading.Lock()
        self._answered = False

    def at(self, name: str) -> None:
        self._write(encode({"at": name}))

    def doing(self, what: str) -> None:
        """Report a long operation; an empty text when it is done."""
        self._write(encode({"doing": what}))

    def answer(self, answer: dict[str, Any]) -> None:
        """Send the answer. Later ones, and those of forked worker processes, are ignored."""
        self._give(encode({"answer": answer}))

    def so_far(self, answer: dict[str, Any]) -> None:
        """Send a provisional answer, in case this process ends without one."""
        line = encode({"so_far": answer})
        with self._lock:
            if not self._answered and os.getpid() == self._owner:
                self._write(line)

    def error(self, error: BaseException) -> None:
        """Send the reason why there is no answer."""
        self._give(encode({"error": error_text(error)}))

    def private(self, how: str) -> None:
        """Report how the sandbox keeps files."""
        self._write(encode({"private": how}))

    def limit(self, passed: Exceeded) -> None:
        """Report the limit at which the child was ended."""
        self._give(encode({"limit": passed}))

    def _give(self, line: bytes) -> None:
        with self._lock:
            if not self._answered and os.getpid() == self._owner:
                self._answered = True
                self._write(line)

    def _write(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._descriptor, line) :]


class Messages:
    """The parent's end: takes bytes, and keeps the last message of each kind."""

    def __init__(self) -> None:
        self.at: str | None = None
        self.doing = ""
        self.answer: dict[str, Any] | None = None
        self.so_far: dict[str, Any] | None = None
        self.error: str | None = None
        self.limit: Exceeded | None = None
        self.private: str | None = None
        self._buffer = bytearray()

    @property
    def final(self) -> bool:
        """Whether the child has sent its last message."""
        return self.answer is not None or self.error is not None or self.limit is not None

    @property
    def pending(self) -> int:
        """The number of bytes of an incomplete line."""
        return len(self._buffer)

    def add(self, part: bytes) -> None:
        self._buffer += part
        if b"\n" not in part:
            return
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = rest
        for line in lines:
            self._take(bytes(line))

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return
        if not isinstance(message, dict) or self.final:
            return
        for kind, expected in _KINDS.items():
            value = message.get(kind)
            if isinstance(value, expected):
                setattr(self, kind, Exceeded(*value) if kind == "limit" else value)
                return
