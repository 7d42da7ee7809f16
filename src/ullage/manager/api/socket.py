"""The daemon's Unix socket: a line of JSON in, a line of JSON out; who speaks is what the kernel says.

    {"verb": "status", "arguments": {"job": 17}}
    {"ok": true, "result": [...]}
    {"ok": false, "error": "NoSuchJob", "message": "no job 17; ..."}

A request may have `"wait": seconds` beside the verb `events`: the answer then comes when there is an event, or at the
end of that time. Nothing that is sent can end the daemon: what cannot be read gets one message, what is too long too,
and then the line is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UllageError
from ullage.manager.client import LARGEST_REQUEST, reachable
from ullage.manager.identity import Caller, caller_of, group_number

_MOST_CONNECTIONS, _LONGEST_WAIT, _DISCARD = 512, 60.0, 5.0

Call = Callable[[Caller, str, dict[str, Any], float], Awaitable[Any]]


class SocketServer:
    """Listens in a folder that only the daemon's user (and a group, if one is named) can enter."""

    def __init__(
        self, file: Path, call: Call, operators: list[str], group: str | None, say: Callable[[str], None]
    ) -> None:
        self._file, self._call, self._operators, self._group, self._say = file, call, operators, group, say
        self._server: asyncio.AbstractServer | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to listen; what an earlier daemon left behind is replaced (its lock is ours by now)."""
        number = None if self._group is None else group_number(self._group)
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listening.bind(reachable(self._file))
        finally:
            os.umask(before)
        if number is not None:
            os.chown(self._file, -1, number)
            os.chmod(self._file, 0o660)
        listening.setblocking(False)
        self._server = await asyncio.start_unix_server(self._serve, sock=listening, limit=LARGEST_REQUEST)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            if len(self._open) > _MOST_CONNECTIONS:
                await _send(writer, failure(InvalidValue("too many connections at once; try again")))
                return
            caller = caller_of(writer.get_extra_info("socket"), self._operators)
            while await self._one(caller, reader, writer):
                pass
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _one(self, caller: Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; false when there will be no other."""
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            if error.partial.strip():
                await _send(writer, failure(InvalidValue("needed a line that ends; the connection ended first")))
            return False
        except asyncio.LimitOverrunError:
            message = f"needed a request of at most {LARGEST_REQUEST} bytes; found a longer one"
            await _send(writer, failure(InvalidValue(message)))
            await _discard(reader)
            return False
        await _send(writer, await self.answer(caller, line))
        return True

    async def answer(self, caller: Caller, line: bytes) -> dict[str, Any]:
        """The answer to a line, whatever it is."""
        try:
            verb, arguments, wait = parse(line)
            return {"ok": True, "result": await self._call(caller, verb, arguments, wait)}
        except UllageError as error:
            return failure(error)
        except Exception as error:  # a mistake of ours must not end the daemon, nor the conversation without a word
            self._say(f"an order failed inside the daemon: {type(error).__name__}: {error}")
            return failure(UllageError(f"the order failed inside the daemon ({type(error).__name__}: {error})"))

    async def stop(self) -> None:
        """Close the door and end all conversations."""
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()


def parse(line: bytes) -> tuple[str, dict[str, Any], float]:
    """Verb, arguments and how long to wait; anything else is refused in one message.

    >>> parse(b'{"verb": "queue"}')
    ('queue', {}, 0.0)
    """
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidValue("needed a line of JSON; found something else") from None
    if not isinstance(request, dict) or not isinstance(request.get("verb"), str):
        raise InvalidValue('needed an object with a "verb"; found none')
    arguments, wait = request.get("arguments", {}), request.get("wait", 0.0)
    if not isinstance(arguments, dict) or not isinstance(wait, int | float) or not 0 <= wait < 1e9:
        raise InvalidValue('needed "arguments" as an object and "wait" as seconds')
    return request["verb"], arguments, min(float(wait), _LONGEST_WAIT)


def failure(error: UllageError) -> dict[str, Any]:
    """An error as it goes over the line."""
    return {"ok": False, "error": type(error).__name__, "message": str(error)}


async def _discard(reader: asyncio.StreamReader) -> None:
    """Read what is still being sent, for a while: who sends would not see the answer otherwise."""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(_DISCARD):
            while await reader.read(1 << 20):
                pass


async def _send(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(json.dumps(answer, allow_nan=False, default=str).encode() + b"\n")
    await writer.drain()
