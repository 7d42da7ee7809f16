"""The process of the web page, which the daemon starts, restarts and ends.

The daemon keeps the socket, and sends the API's address and a token through standard input. Under root, the page gets
the rights of an unprivileged user who can run Python; it gets its folder of sessions as a descriptor.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, MissingPackage, UllageError
from ullage.manager.api.server import listen_at
from ullage.manager.running.environment import least_environment
from ullage.manager.settings import PageSettings

TOKEN_NAME = "page of the daemon"
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
_STABLE, _LONGEST_PAUSE = 60.0, 60.0  # seconds of life after which it restarts without a pause, and longest pause
_MOST_TOKENS = 8  # valid tokens of links
_LONGEST_LINE = 64 << 10
_USERS = ("ullage", "nobody")  # the first existing user runs the page of root's daemon
_CAN_READ = """
import importlib.util, os
for name in ("ullage", "nicegui", "fastapi"):
    for folder in importlib.util.find_spec(name).submodule_search_locations:
        os.listdir(folder)
"""

Order = Callable[[str, dict[str, Any]], Awaitable[Any]]


class PageProcess:
    """The page's process, which `run` keeps alive. `order` carries out orders as the daemon's own user."""

    def __init__(
        self, settings: PageSettings, listen: str, url: str, run: Path, order: Order, say: Callable[[str], None]
    ) -> None:
        if importlib.util.find_spec("nicegui") is None:
            raise MissingPackage("nicegui", "web pages")
        self._settings, self._url, self._order, self._say = settings, url, order, say
        self._rights = _rights(settings.user, say)
        folder = run / "page-sessions"
        folder.mkdir(mode=0o700, exist_ok=True)
        if self._rights:  # not its contents: the page's user could have put a link there
            os.chown(folder, self._rights["user"], self._rights["group"])
        self._sessions_folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._door = listen_at(listen, "--page", "the page", say)

    async def run(self) -> None:
        pause = 0.0
        try:
            while True:
                began = time.monotonic()
                try:
                    how = await self._once()
                except (OSError, UllageError) as error:
                    how = f"it cannot be started: {error}"
                pause = 1.0 if time.monotonic() - began > _STABLE else min(_LONGEST_PAUSE, max(1.0, 2 * pause))
                self._say(f"the page ended ({how}); it is started again in {pause:.0f} s")
                await asyncio.sleep(pause)
        finally:
            self._door.close()
            os.close(self._sessions_folder)

    async def _once(self) -> str:
        token = await self._new_token()
        handed = {
            "fd": self._door.fileno(),
            "url": self._url,
            "token": token,
            "session": self._settings.session,
            "kept": f"/proc/self/fd/{self._sessions_folder}",
        }
        env = _environment(self._rights["user"]) if self._rights else dict(os.environ)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "ullage",
            "page",
            "--of-daemon",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[self._door.fileno(), self._sessions_folder],
            cwd="/",
            env=env,
            start_new_session=True,
            limit=_LONGEST_LINE,
            **self._rights,
        )
        assert process.stdin is not None and process.stderr is not None
        try:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(json.dumps(handed).encode() + b"\n")
                await process.stdin.drain()
            await self._hear(process.stderr)
            code = await process.wait()
        finally:
            await _end(process)
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    async def _new_token(self) -> str:
        """Make a token for the page's link, and revoke the oldest tokens of earlier processes."""
        tokens = await self._order("tokens", {"everybody": False})
        for old in [each for each in tokens if each["name"] == TOKEN_NAME and each["revoked"] is None][
            : -_MOST_TOKENS + 1
        ]:
            await self._order("token_revoke", {"token": old["id"]})
        terms = {"name": TOKEN_NAME, "scope": self._settings.scope, "lasts": self._settings.session}
        return str((await self._order("token_create", terms))["token"])

    async def _hear(self, errors: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await errors.readline()
            except ValueError:  # longer than any valid message
                continue
            if not line:
                return
            self._say(line.decode(errors="replace").rstrip().removeprefix("ullage: "))


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _GRACE)
        except TimeoutError:
            process.kill()


def _rights(user: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the rights of the process; empty if it keeps those of the daemon."""
    if user is None:
        return _least_rights(say) if os.getuid() == 0 else {}
    if os.getuid() != 0:
        raise InvalidValue("user in the table [page] must be left out unless root runs the daemon")
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise InvalidValue(f"this system has no user {user!r} for the page") from None
    return _rights_of(account)


def _rights_of(user: pwd.struct_passwd) -> dict[str, Any]:
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _least_rights(say: Callable[[str], None]) -> dict[str, Any]:
    """Return the rights of an unprivileged user, or those of root if no such user can run the page."""
    names = {each.pw_name: each for each in pwd.getpwall()}
    for user in (names[name] for name in _USERS if name in names):
        try:
            env = _environment(user.pw_uid)
            command = [sys.executable, "-c", _CAN_READ]
            subprocess.run(command, check=True, capture_output=True, timeout=60, cwd="/", env=env, **_rights_of(user))
        except (OSError, subprocess.SubprocessError):
            continue
        return _rights_of(user)
    say(
        "the page runs as root: other users cannot read this Python and its packages. Install them where all users can "
        f"read ({sys.prefix} or what it leads to is closed), or name a user who can (user in the table [page])"
    )
    return {}


def _environment(user: int) -> dict[str, str]:
    names = ("PYTHONPATH", "TZ", "LANG")
    return least_environment(user) | {name: os.environ[name] for name in names if name in os.environ}
