"""The signed-in users: a session is a random number in a cookie and, only in this process's memory, a token."""

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ullage.errors import NoDaemon, NotAllowed, UllageError
from ullage.manager.api.gate import NO_TOKEN
from ullage.manager.client import Client
from ullage.manager.page.questions import OwnEstimates, SessionQuestions
from ullage.manager.page.readings import DaemonReading, Readings, SharedReadings
from ullage.text import plain_values

CODE_LASTS = 600.0  # seconds during which a link works, once
LONGEST_IDLE = 1800.0  # seconds after which a session without an open page ends
MOST_SESSIONS = 1000
_CHECK = 3.0  # seconds between two checks of a session's own token
_TIMEOUT = 10.0  # seconds that the daemon may take to answer
_WINDOW, _EACH, _ALL = 60.0, 10, 200  # window in seconds, and failures in it: of one address, of all
_AS_IT_IS = ("logs", "estimate", "estimated")  # orders whose answers contain lines of text
_WHO = "this daemon does not know that token; create one with `ullage admin token create`"


MakeToken = Callable[[], tuple[str, Callable[[], None]]]
"""Makes a token for the user of this process; returns it with a function that revokes it."""


class Session:
    """A signed-in user, with a token and the daemon's last answers. `make_token` makes the token on first use, since a
    page may be opened without a daemon. `own` is the user of this process, `first` the page shown first."""

    def __init__(
        self, of: "Sessions", make_token: MakeToken, lasts: float, own: bool = False, first: str = "/", number: str = ""
    ) -> None:
        self.id, self.first = number or secrets.token_urlsafe(32), first
        self.readings, self.questions = Readings(self), SessionQuestions(self.ask, of.here if own else None)
        self._shared, self._checked, self._checking = of.shared, -_CHECK, asyncio.Lock()
        self._url, self._make_token, self._clock = of.url, make_token, of.clock
        self._token, self._forget = "", _nothing
        self._ends, self._seen, self._over = of.clock() + lasts, of.clock(), False
        self._client: Client | None = None
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "page")

    @property
    def token(self) -> str:
        """Return the token for the daemon; empty after the end of the session."""
        return self._token

    @property
    def over(self) -> bool:
        """Whether the session has ended by signing out, by time, or by an invalid token."""
        now = self._clock()
        return self._over or now > self._ends or now > self._seen + LONGEST_IDLE

    @property
    def busy(self) -> bool:
        return self._turn.locked()

    def seen(self) -> None:
        """Note that a page is open."""
        self._seen = self._clock()

    def end(self) -> None:
        if not self._over:
            self._over, self._token, self._client, forget = True, "", None, self._forget
            self._thread.shutdown(wait=False)
            forget()

    async def check(self) -> None:
        """Ask the daemon for the user of this session's own token, and share that user's readings."""
        about = await self.ask("ping")
        self._checked = time.monotonic()
        self._show(self._shared.of(self, about))

    async def reading(self) -> DaemonReading:
        """Check this session's own token, and return the last reading of any session of the same user."""
        async with self._checking:
            if self.over or time.monotonic() > self._checked + _CHECK:
                try:
                    await self.check()
                except NotAllowed:
                    self._show(Readings(self))
                except UllageError:
                    pass  # the reading reports that the daemon does not answer
        return await self.readings.latest()

    def _show(self, readings: Readings) -> None:
        if readings is not self.readings:
            self.readings.leave(self)
            self.readings = readings

    async def ask(self, verb: str, **arguments: Any) -> Any:
        """Send an order of this user to the daemon, one at a time."""
        async with self._turn:
            if self.over:
                raise NotAllowed("you are signed out")
            try:
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._call, verb, arguments)
            except NotAllowed as error:
                if str(error).startswith(NO_TOKEN[:40]):
                    self.end()
                raise

    def _call(self, verb: str, arguments: dict[str, Any]) -> Any:
        if not self._token:
            self._token, self._forget = self._make_token()
        if self._client is None:
            self._client = Client(url=self._url(), token=self._token, timeout=_TIMEOUT)
        try:
            answer = self._client.call(verb, **arguments)
            return answer if verb in _AS_IT_IS else plain_values(answer)
        except NoDaemon:
            self._client = None  # a new daemon may have another address
            raise


def _nothing() -> None:
    """Do nothing: users' own tokens outlive the session."""


class Sessions:
    """Signs users in. `url` returns the API's address; `make_token` makes a token for the user of this process; `here`
    makes estimates for that user without a daemon; `store` keeps sessions for the next process."""

    def __init__(
        self,
        url: Callable[[], str],
        lasts: float,
        make_token: MakeToken | None = None,
        clock: Callable[[], float] = time.monotonic,
        here: OwnEstimates | None = None,
        store: "KeptSessions | None" = None,
    ) -> None:
        self.url, self.clock, self.here, self.shared = url, clock, here, SharedReadings()
        self._lasts, self._make_token, self._stored = lasts, make_token, store
        self._sessions: dict[str, Session] = {}
        self._codes: dict[str, tuple[float, str]] = {}
        self._failures: dict[str, deque[float]] = defaultdict(deque)

    def new_code(self, first: str = "/") -> str:
        """Return the code of a link that, once and within some minutes, signs in as the user of this process and shows
        the page `first`."""
        code = secrets.token_urlsafe(24)
        self._codes[code] = self.clock() + CODE_LASTS, first
        return code

    def find(self, number: str | None) -> Session | None:
        self._clean()
        if number is not None and number not in self._sessions and self._stored is not None:
            known = self._stored.find(number)
            if known is not None:
                make = self._make_token if known.own and not known.token else None
                make = make or (lambda: (known.token, _nothing))
                self._add(Session(self, make, known.ends - time.time(), known.own, number=number))
        return self._sessions.get(number or "")

    async def sign_in(self, address: str, token: str = "", code: str = "") -> Session:
        """Open a session for a token or for the code of a link; raise `NotAllowed` if it is invalid."""
        self._check_rate(address)
        try:
            session = await (self._by_code(code) if code else self._by_token(token.strip()))
        except NotAllowed:
            self._failures[address].append(self.clock())
            raise
        self._clean()
        self._add(session)
        if self._stored is not None:
            self._stored.keep(session.id, session.token, time.time() + self._lasts, own=bool(code))
        return session

    def end_all(self) -> None:
        """End all sessions that are not stored for the next process."""
        while self._sessions and self._stored is None:
            self.end(next(iter(self._sessions.values())))
        if self.here is not None:
            self.here.close()

    def _add(self, session: Session) -> None:
        while len(self._sessions) >= MOST_SESSIONS:
            self.end(next(iter(self._sessions.values())))
        self._sessions[session.id] = session

    def end(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        session.end()
        if self._stored is not None:
            self._stored.drop(session.id)

    async def _by_code(self, code: str) -> Session:
        until, first = self._codes.pop(code, (-1.0, "/"))
        if self._make_token is None or self.clock() > until:
            raise NotAllowed("this link was already used or has expired; sign in with a token")
        session = Session(self, self._make_token, self._lasts, True, first)
        try:
            await session.check()
        except NoDaemon:
            if self.here is None:
                self._codes[code] = until, first  # the link was not used up
                raise
            session.first = first if first != "/" else "/estimate"
        except UllageError:
            self._codes[code] = until, first
            raise
        return session

    async def _by_token(self, token: str) -> Session:
        if not token.isascii() or not token.isprintable() or not 0 < len(token) < 500:
            raise NotAllowed(_WHO)
        session = Session(self, lambda: (token, _nothing), self._lasts)
        try:
            await session.check()
        except NotAllowed:
            raise NotAllowed(_WHO) from None
        return session

    def _check_rate(self, address: str) -> None:
        now = self.clock()
        for each in list(self._failures):
            while self._failures[each] and self._failures[each][0] < now - _WINDOW:
                self._failures[each].popleft()
            if not self._failures[each]:
                del self._failures[each]
        if len(self._failures.get(address, ())) >= _EACH or sum(map(len, self._failures.values())) >= _ALL:
            raise TooManyTries("too many tries; wait a minute")

    def _clean(self) -> None:
        for session in list(self._sessions.values()):
            if session.over:
                self.end(session)


class TooManyTries(UllageError):
    """Too many failures to sign in."""


_LARGEST = 4096  # bytes


class KeptSession(NamedTuple):
    """A session's token, its end in seconds since 1970, and whether the page's own user opened it by link."""

    token: str
    ends: float
    own: bool


class KeptSessions:
    """The sessions in a folder, by their numbers. `of` names the daemon, since no other may get its tokens.

    >>> import tempfile
    >>> kept = KeptSessions(Path(tempfile.mkdtemp()))
    >>> kept.keep("number of a session", "token", ends=time.time() + 60, own=False)
    >>> kept.find("number of a session").token, kept.find("another number")
    ('token', None)
    >>> kept.drop("number of a session"); kept.find("number of a session") is None
    True
    """

    def __init__(self, folder: Path, of: str = "") -> None:
        self._folder, self._of = folder, of
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for file in folder.iterdir():
                if file.stat().st_mtime < time.time():  # the time of a file is the end of its session
                    file.unlink()

    def keep(self, number: str, token: str, ends: float, own: bool) -> None:
        """Store a session. If that fails, the session ends with this process."""
        sealed = _mixed(number, json.dumps([token, ends, own]).encode())
        file = self._file(number)
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as target:
                target.write(_tag(number, sealed) + sealed)
            os.utime(file, (ends, ends))

    def find(self, number: str) -> KeptSession | None:
        try:
            with self._file(number).open("rb") as source:
                tag, sealed = source.read(32), source.read(_LARGEST)
        except OSError:
            return None
        if not hmac.compare_digest(tag, _tag(number, sealed)):
            return None
        session = KeptSession(*json.loads(_mixed(number, sealed)))
        return session if session.ends > time.time() else None

    def drop(self, number: str) -> None:
        with contextlib.suppress(OSError):
            self._file(number).unlink()

    def _file(self, number: str) -> Path:
        return self._folder / hashlib.sha256(f"name {self._of} {number}".encode()).hexdigest()


def _mixed(number: str, text: bytes) -> bytes:
    """Encrypt or decrypt a text. Its number is random and used once."""
    stream = hashlib.shake_256(b"seal" + number.encode()).digest(len(text))
    return bytes(one ^ other for one, other in zip(text, stream, strict=True))


def _tag(number: str, sealed: bytes) -> bytes:
    return hmac.new(b"tag" + number.encode(), sealed, "sha256").digest()
