"""Caches NiceGUI's files compressed. A browser requests two dozen of them; compressing the largest takes 0.1 s."""

import nicegui
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_FILES = f"/_nicegui/{nicegui.__version__}/"  # files below it never change while this process lives


class StaticCache:
    """An app that caches the compressed files of another one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._messages: dict[str, list[Message]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_file(scope):
            await self._app(scope, receive, send)
        elif scope["path"] in self._messages:
            for message in self._messages[scope["path"]]:
                await send(message)
        else:
            await self._keep(scope, receive, send)

    async def _keep(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages: list[Message] = []

        async def record(message: Message) -> None:
            messages.append(message)
            await send(message)

        await self._app(scope, receive, record)
        if messages[0]["status"] == 200 and (b"content-encoding", b"gzip") in messages[0]["headers"]:
            self._messages[scope["path"]] = messages


def _is_file(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].startswith(_FILES):
        return False
    headers = dict(scope["headers"])
    return b"gzip" in headers.get(b"accept-encoding", b"") and b"range" not in headers


def address_of(module: str) -> str:
    from nicegui.dependencies import esm_modules

    return f"{_FILES}esm/{next(key for key, each in esm_modules.items() if each.name == module)}/index.js"
