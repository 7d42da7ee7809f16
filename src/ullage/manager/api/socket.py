"""The daemon's Unix socket: a line of JSON in, a line of JSON out; who speaks is what the kernel says.

    {"protocol": 2, "order": "status", "arguments": {"job": 17}}
    {"protocol": 2, "ok": true, "result": [...]}
    {"protocol": 2, "ok": false, "error": "NoSuchJob", "message": "no job 17; ..."}

A request may have `"wait": seconds` beside the order `events`: the answer then comes when there is an event, or at the
end of that time. Nothing that is sent can end the daemon: what cannot be read gets one message, what is too long too,
and then the line is closed. So is a line over which nothing comes for a long time, and the one that has been idle
longest where there are too many.
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

import ullage
from ullage.errors import InvalidValue, NotAllowed, OtherVersion, UllageError
from ullage.manager.api.door import Door, Guest
from ullage.manager.api.encoding import encoded
from ullage.manager.identity import Caller, caller_of, group_number
from ullage.manager.settings import AccessSettings, LimitSettings
from ullage.manager.transport import LARGEST_REQUEST, PROTOCOL, reachable

_MOST_CONNECTIONS, _FOR_OPERATORS = 512, 32
_LOOK = 1.0  # seconds after which it is seen that who waits is gone
_LONGEST_WAIT, _QUESTION, _DISCARD, _LONGEST_SENDING = 60.0, 1.0, 5.0, 60.0  # seconds
LONGEST_IDLE = 600.0  # seconds after which a line over which nothing comes is closed

_TOO_MANY = "you have too many connections that wait for an answer; try again when one of them has ended"

Call = Callable[[Caller, str, dict[str, Any], float], Awaitable[Any]]


class SocketServer:
    """The server of the Unix socket, in a folder for the daemon's user and perhaps a group."""

    def __init__(
        self, file: Path, call: Call, access: AccessSettings, limits: LimitSettings, say: Callable[[str], None]
    ) -> None:
        self._file, self._call, self._access, self._say = file, call, access, say
        self._server: asyncio.AbstractServer | None = None
        self._listening: tuple[int, int] | None = None  # which file is ours
        self._open: set[asyncio.Task[None]] = set()
        self._door = Door(_MOST_CONNECTIONS, limits.connections, _FOR_OPERATORS)

    async def start(self) -> None:
        """Begin to listen, and replace the socket of an earlier daemon, whose lock is ours by now."""
        number = None if self._access.group is None else group_number(self._access.group)
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
        self._listening = self._on_disk()
        self._server = await asyncio.start_unix_server(
            self._serve, sock=listening, limit=LARGEST_REQUEST, backlog=2 * _MOST_CONNECTIONS
        )

    async def keep_listening(self) -> None:
        """Make the socket again if its file was removed."""
        if self._server is None or self._on_disk() == self._listening:
            return
        self._server.close()
        try:
            await self.start()
        except OSError as error:
            self._listening = None
            self._say(f"the socket {self._file} was removed and cannot be made again: {error}")
            return
        self._say(f"the socket {self._file} was removed; it was made again")

    def _on_disk(self) -> tuple[int, int] | None:
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        caller = caller_of(writer.get_extra_info("socket"), self._access.operators)
        guest = Guest(caller.uid, task.cancel, caller.operator)
        try:
            if self._door.enter(guest):
                while await self._one(caller, guest, reader, writer):
                    pass
            else:
                await _read_first(reader)
                await _send(writer, failure(NotAllowed(_TOO_MANY)))
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._door.leave(guest)
            self._open.discard(task)
            writer.close()

    async def _one(
        self, caller: Caller, guest: Guest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer one request; return false if no other can follow."""
        guest.idle()
        try:
            async with asyncio.timeout(LONGEST_IDLE):
                line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            if error.partial.strip():
                await _send(writer, failure(InvalidValue("a request's line must end before the connection does")))
            return False
        except asyncio.LimitOverrunError:
            message = f"a request must have at most {LARGEST_REQUEST} bytes, got more"
            await _send(writer, failure(InvalidValue(message)))
            await _discard(reader)
            return False
        guest.busy()
        answering = asyncio.ensure_future(self.answer(caller, line))
        try:
            while not (await asyncio.wait({answering}, timeout=_LOOK))[0]:
                if reader.at_eof() and b'"wait"' in line:  # nobody waits for it any more
                    return False
        finally:
            answering.cancel()
        answer = answering.result()
        guest.idle()
        await _send(writer, answer)
        return True

    async def answer(self, caller: Caller, line: bytes) -> dict[str, Any]:
        """Return the answer to a line, whatever it contains."""
        try:
            verb, arguments, wait = parse(line)
            return {"protocol": PROTOCOL, "ok": True, "result": await self._call(caller, verb, arguments, wait)}
        except UllageError as error:
            return failure(error)
        except Exception as error:  # a mistake of ours must not end the daemon, nor the conversation without a word
            self._say(f"an order failed inside the daemon: {type(error).__name__}: {error}")
            return failure(UllageError(f"the order failed inside the daemon ({type(error).__name__}: {error})"))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()


def parse(line: bytes) -> tuple[str, dict[str, Any], float]:
    """Parse a request: verb, arguments and how long to wait."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidValue("a request must be a line of JSON, got something else") from None
    if isinstance(request, dict) and ("order" in request or "verb" in request):
        check_protocol(request.get("protocol"))
    if not isinstance(request, dict) or not isinstance(request.get("order"), str):
        raise InvalidValue('a request must be an object with an "order", got none')
    arguments, wait = request.get("arguments", {}), request.get("wait", 0.0)
    if not isinstance(arguments, dict) or not isinstance(wait, int | float) or not 0 <= wait < 1e9:
        raise InvalidValue('"arguments" must be an object, and "wait" must be seconds')
    return request["order"], arguments, min(float(wait), _LONGEST_WAIT)


def check_protocol(spoken: Any) -> None:
    """Refuse requests of another version, and say what to type."""
    if type(spoken) is int and spoken > PROTOCOL:
        raise OtherVersion(
            f"the daemon is Ullage {ullage.__version__}, older than this command; restart it with the version that is "
            "installed now: systemctl restart ullage, or end it and type: ullage serve"
        )
    if spoken != PROTOCOL:
        raise OtherVersion(
            f"this command is older than the daemon, which is Ullage {ullage.__version__}; "
            "type: pip install --upgrade ullage"
        )


def failure(error: UllageError) -> dict[str, Any]:
    return {"protocol": PROTOCOL, "ok": False, "error": type(error).__name__, "message": str(error)}


async def _read_first(reader: asyncio.StreamReader) -> None:
    """Read the request: closing a socket with unread input discards the answer."""
    with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(_QUESTION):
            await reader.readuntil(b"\n")


async def _discard(reader: asyncio.StreamReader) -> None:
    """Read the rest of a request for a while: the client may not see the answer otherwise."""
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(_DISCARD):
            while await reader.read(1 << 20):
                pass


async def _send(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(await encoded(answer) + b"\n")
    async with asyncio.timeout(_LONGEST_SENDING):
        await writer.drain()
