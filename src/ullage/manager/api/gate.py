"""The checks before each request: its user, and the limits on connections, requests and time.

On the Unix socket the kernel identifies the user; on TCP a token does. A request without a valid token is refused
before its body is read, except for `/health`. Incomplete requests time out. If there are too many connections, an idle
one is closed.
"""

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

import ullage
from ullage.errors import UPDATE
from ullage.manager.identity import Caller, caller_of
from ullage.manager.transport import PROTOCOL, PROTOCOL_HEADER, RESTART

LONGEST_HEAD = 15  # seconds within which the headers of a request over TCP must arrive
LONGEST_IDLE = 600  # seconds after which an idle connection to the Unix socket is closed
MOST_CONNECTIONS, MOST_REQUESTS = 256, 192  # over TCP; requests at a time, without those of operators
MOST_LOCAL_CONNECTIONS, FOR_OPERATORS = 512, 32
NO_TOKEN = (
    "the header Authorization must be 'Bearer TOKEN' with a token of this daemon (run/api-token in its home, or one "
    "from `ullage admin token create`), got "
)
HEALTH = "/health"
Whose = Callable[[str], Caller | None]
_TOO_MANY = "you have too many connections that wait for an answer; try again when one of them has ended"
_UPDATE = f"this command is older than the daemon, which is Ullage {ullage.__version__}; type: {UPDATE}"


def problem(kind: str, message: str, status: int, headers: dict[str, str] | None = None) -> Response:
    content = json.dumps({"error": kind, "message": message})  # in ASCII, since a message may quote half a character
    return Response(content, status, headers, media_type="application/json")


class Gate:
    """Identifies the caller (`scope["state"]["caller"]`), and lets each user make `each` requests at a time.
    `health` returns the daemon's health in one word."""

    def __init__(self, app: ASGIApp, whose: Whose, each: int, health: Callable[[], str] = lambda: "ok") -> None:
        self._app, self._whose, self._each, self._health = app, whose, each, health
        self._inside: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == HEALTH and scope["method"] in ("GET", "HEAD"):
            word = self._health()
            await JSONResponse({"status": word}, 200 if word == "ok" else 503)(scope, receive, send)
            return
        headers, state = dict(scope["headers"]), scope.setdefault("state", {})
        guest: Guest | None = state.get("guest")
        caller = None if guest is None else guest.caller
        limited = caller is None  # the Unix socket has its own limits
        if caller is None:
            kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
            caller = self._whose(token.strip()) if kind.lower() == "bearer" else None
            if caller is None:
                text = NO_TOKEN + ("another" if token else "none")
                await problem("NotAllowed", text, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        misunderstood = other_version(headers.get(PROTOCOL_HEADER.encode()))
        if misunderstood is not None:
            await problem("OtherVersion", misunderstood, 400)(scope, receive, send)
            return
        limited = limited and not caller.operator
        if limited and (self._inside[caller.uid] >= self._each or self._inside.total() >= MOST_REQUESTS):
            text = f"{caller.user} has too many requests that wait for an answer; try again when one of them has ended"
            await problem("NotAllowed", text, 429)(scope, receive, send)
            return
        state["caller"] = caller
        if guest is not None:
            guest.busy()  # an admitted request keeps its connection until it is answered
        self._inside[caller.uid] += limited
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside[caller.uid] -= limited


def other_version(spoken: bytes | None) -> str | None:
    """Return what to type if the client has another version; `None` if the daemon understands it."""
    if spoken is None or spoken == str(PROTOCOL).encode():
        return None
    if spoken.isdigit() and int(spoken[:9]) > PROTOCOL:
        return f"the daemon is Ullage {ullage.__version__}, older than this command; {RESTART}"
    return _UPDATE


@dataclass(eq=False)
class Guest:
    """A connection: its user or address, and the time since which it is idle; `None` while it waits for an answer."""

    who: Hashable  # a user, or an address
    close: Callable[[], object]
    operator: bool = False
    caller: Caller | None = None  # on the Unix socket, where the kernel says who it is
    idle_since: float | None = 0.0

    def busy(self) -> None:
        self.idle_since = None

    def idle(self) -> None:
        self.idle_since = time.monotonic()


class ConnectionLimit:
    """Admits connections. If there is no room, it closes the longest idle one of the user with most of them.

    A user or address may have at most `each` connections, and the last `reserve` places are for operators.

    >>> door, closed = ConnectionLimit(most=3, each=2, reserve=1), []
    >>> def comes(who, operator=False):
    ...     return door.enter(Guest(who, lambda: closed.append(who), operator))
    >>> [comes(who) for who in ("ann", "ann", "ann", "bob")], closed
    ([True, True, True, True], ['ann', 'ann'])
    >>> comes("root", operator=True), comes("root", operator=True), closed
    (True, True, ['ann', 'ann', 'ann'])
    """

    def __init__(self, most: int, each: int | None = None, reserve: int = 0) -> None:
        self._most, self._each, self._reserve = most, each, reserve
        self._inside: dict[Guest, None] = {}

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, guest: Guest) -> bool:
        """Admit a connection if there is room, or if closing an idle one makes room."""
        guest.idle()
        of_same = [other for other in self._inside if other.who == guest.who]
        if self._each is not None and not guest.operator and len(of_same) >= self._each and not self._close(of_same):
            return False
        room = self._most if guest.operator else self._most - self._reserve
        if len(self._inside) >= room and not self._close(list(self._inside)):
            return False
        self._inside[guest] = None
        return True

    def leave(self, guest: Guest) -> None:
        self._inside.pop(guest, None)

    def _close(self, guests: list[Guest]) -> bool:
        idle = [(guest, guest.idle_since) for guest in guests if guest.idle_since is not None]
        if not idle:
            return False
        number = Counter(guest.who for guest, _ in idle)
        chosen, _ = min(idle, key=lambda each: (each[0].operator, -number[each[0].who], each[1]))
        self.leave(chosen)
        chosen.close()
        return True


class GuardedConnection(H11Protocol):
    """A connection that counts against the limits of its `door`. Callers on the Unix socket may be `operators`."""

    _guest: Guest
    _late: asyncio.TimerHandle

    def __init__(self, config: Config, state: ServerState, door: ConnectionLimit, operators: list[str]) -> None:
        super().__init__(config, state, {})
        self._door, self._operators, self._longest_idle = door, operators, LONGEST_HEAD

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family == socket.AF_UNIX:
            caller = caller_of(connection, self._operators)
            self._guest = Guest(caller.uid, transport.abort, caller.operator, caller)
            self._longest_idle = self.timeout_keep_alive = LONGEST_IDLE
        else:
            self._guest = Guest(self.client[0] if self.client else "", transport.abort)
        self.app_state["guest"] = self._guest
        allowed = self._door.enter(self._guest)
        self._late = self.loop.call_later(self._longest_idle, self._close_if_idle)
        if not allowed:
            self._refuse(503, "NotAllowed", _TOO_MANY)

    def eof_received(self) -> None:
        if self.conn.trailing_data[0] and (self.cycle is None or self.cycle.response_complete):
            self.send_400_response("a request must end before the connection does")

    def send_400_response(self, msg: str) -> None:
        """Send the reason, unless an answer is being sent."""
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(400, "InvalidValue", msg)
        self.transport.close()

    def _refuse(self, status: int, kind: str, message: str) -> None:
        body = json.dumps({"error": kind, "message": message})
        head = f"HTTP/1.1 {status} Refused\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(f"{head}Connection: close\r\n\r\n{body}".encode())
        self.transport.close()

    def on_response_complete(self) -> None:
        self._guest.idle()
        super().on_response_complete()

    def connection_lost(self, error: Exception | None) -> None:
        self._late.cancel()
        self._door.leave(self._guest)
        super().connection_lost(error)

    def _close_if_idle(self) -> None:
        """Close the connection if it was idle for too long; otherwise check again later."""
        since, now = self._guest.idle_since, time.monotonic()
        left = self._longest_idle - (0.0 if since is None else now - since)
        if left <= 0:
            self.transport.abort()
        else:
            self._late = self.loop.call_later(left, self._close_if_idle)
