"""The checks before each request to the page: session, origin, and content that a browser may load. Without a session,
only the form to sign in and `/health` are served."""

import html
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ullage.errors import NoDaemon, NotAllowed, UllageError
from ullage.manager.page.kept_files import StaticCache
from ullage.manager.page.sessions import Session, Sessions, TooManyTries

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("/_page/sign-in.js", "/_page/charts.js", "/_page/frame.js")
_FILES = {"/_page/page.css": "text/css"} | dict.fromkeys(_SCRIPTS, "text/javascript")
_LARGEST_FORM = 4096  # bytes
_HEADERS = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
# NiceGUI compiles the templates of its components in the browser, which needs 'unsafe-eval'. Scripts inside the page
# run only with the nonce of this answer, and handlers such as onerror="..." never do.
_POLICY = (
    "default-src 'none'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'"
)
_OWN_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'"
)


class PageGate:
    def __init__(self, app: ASGIApp, sessions: Sessions, port: int, say: Callable[[str], None]) -> None:
        self._app, self._sessions, self._say = StaticCache(app), sessions, say
        self._cookie = f"ullage_page_{port}"  # cookies do not distinguish the ports of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        session = self._sessions.find(connection.cookies.get(self._cookie))
        if scope["type"] == "websocket":
            if session is None or not same_origin(connection.headers):
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        answer = await self._own_answer(Request(scope, receive), session)
        if answer is not None:
            answer.headers.update(_HEADERS)
            answer.headers.setdefault("Content-Security-Policy", _OWN_POLICY)
            answer.headers.setdefault("Cache-Control", "no-store")
            await answer(scope, receive, send)
        else:
            scope.setdefault("state", {})["session"] = session
            await self._inside(scope, receive, send)

    async def _own_answer(self, request: Request, session: Session | None) -> Response | None:
        """Return the gate's own answer, or `None` if the page must answer."""
        method, path = request.method, request.url.path
        if method not in ("GET", "HEAD", "POST"):
            return _plain("the method must be GET or POST", 405)
        if method == "POST" and not same_origin(request.headers):
            return _plain("this request comes from another site", 403)
        if path == "/health":
            return JSONResponse({"status": "ok"})
        if path in _FILES:
            return Response((_STATIC / path.rpartition("/")[2]).read_bytes(), media_type=_FILES[path])
        if path == "/sign-in":
            return await self._sign_in(request) if method == "POST" else sign_in_form()
        if path == "/_page/session":
            return Response(status_code=204 if session is not None else 401)
        if session is None:
            wants_page = method != "POST" and not path.startswith("/_nicegui")
            return RedirectResponse("/sign-in", 303) if wants_page else _plain("sign in first", 401)
        if path == "/sign-out":
            if method != "POST":
                return RedirectResponse("/", 303)
            self._sessions.end(session)
            answer = RedirectResponse("/sign-in", 303)
            answer.delete_cookie(self._cookie, path="/")
            return answer
        return None

    async def _sign_in(self, request: Request) -> Response:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _LARGEST_FORM:
                return sign_in_form("that is too long for a token", 413)
        form = parse_qs(body.decode("latin-1"))
        token, code = (form.get(name, [""])[0] for name in ("token", "code"))
        try:
            session = await self._sessions.sign_in(request.client.host if request.client else "", token, code)
        except TooManyTries as error:
            return sign_in_form(str(error), 429)
        except NoDaemon:
            return sign_in_form("the daemon does not answer; try again when it runs", 503)
        except NotAllowed as error:
            return sign_in_form(str(error), 403)
        except UllageError as error:
            self._say(f"signing in failed: {error}")
            return sign_in_form("the daemon refused; the log of the page says more", 502)
        answer = RedirectResponse(session.first, 303)
        secure = request.url.scheme == "https"
        answer.set_cookie(self._cookie, session.id, path="/", httponly=True, samesite="strict", secure=secure)
        return answer

    async def _inside(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send NiceGUI's answer with our headers; turn an error into one sentence."""
        nonce = secrets.token_urlsafe(16)
        start: Message | None = None
        body = b""
        if not scope["path"].startswith("/_nicegui"):  # pages are changed here, so they must not be compressed
            scope["headers"] = [each for each in scope["headers"] if each[0] != b"accept-encoding"]

        async def checked(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                headers = {name.lower(): value for name, value in message["headers"]}
                kind = headers.get(b"content-type", b"")
                for name, value in {**_HEADERS, "Content-Security-Policy": _POLICY.format(nonce=nonce)}.items():
                    headers[name.lower().encode()] = value.encode()
                if kind.startswith(b"text/html") or message["status"] >= 400:
                    headers[b"cache-control"] = b"no-store"
                    headers.pop(b"content-length", None)
                    start = {**message, "headers": list(headers.items())}
                    return
                await send({**message, "headers": list(headers.items())})
                return
            if start is None or message["type"] != "http.response.body":
                await send(message)
                return
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            if start["status"] >= 400:
                answer = _problem(start["status"])
                answer.headers.update(_HEADERS)
                answer.headers["Content-Security-Policy"] = _OWN_POLICY
                await answer(scope, receive, send)
                return
            # In users' texts `<` is escaped, so all these tags are NiceGUI's own.
            whole = body.replace(b"<script", f'<script nonce="{nonce}"'.encode())
            start["headers"].append((b"content-length", str(len(whole)).encode()))
            await send(start)
            await send({"type": "http.response.body", "body": whole})

        try:
            await self._app(scope, receive, checked)
        except Exception as error:
            self._say(f"the page failed at {scope['path'][:80]!r}: {type(error).__name__}: {str(error)[:200]}")
            answer = _problem(500)
            answer.headers.update(_HEADERS)
            await answer(scope, receive, send)


def same_origin(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from a page of this server, according to the browser.

    >>> same_origin({"origin": "http://gpus:8601", "host": "gpus:8601"})
    True
    >>> same_origin({"origin": "http://elsewhere", "host": "gpus:8601"}), same_origin({"host": "gpus:8601"})
    (False, False)
    """
    place = urlsplit(headers.get("origin", "")).netloc
    return bool(place) and place == headers.get("host")


def _plain(text: str, status: int) -> Response:
    return Response(text + "\n", status, media_type="text/plain")


def _problem(status: int) -> Response:
    text = "This page does not exist." if status < 500 else "The page failed; see its log."
    return HTMLResponse(
        _document("Ullage", f'<p role="alert">{text}</p><p><a href="/">Back to the GPUs</a></p>'), status
    )


def sign_in_form(problem: str = "", status: int = 200) -> Response:
    alert = f'<p class="problem" role="alert">{html.escape(problem)}</p>' if problem else ""
    body = f"""
<h1>Ullage</h1>
{alert}
<form method="post" action="/sign-in" id="sign-in">
  <label for="token">Token</label>
  <input id="token" name="token" type="password" autocomplete="off" required autofocus maxlength="499">
  <input id="code" name="code" type="hidden">
  <button type="submit">Sign in</button>
</form>
<p class="hint"><code>ullage admin token create --expires 30d</code> prints a token.</p>
"""
    return HTMLResponse(_document("Sign in - Ullage", body), status)


def _document(title: str, body: str) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/_page/page.css">
<script src="/_page/sign-in.js" defer></script>
</head>
<body class="plain"><main>{body}</main></body>
</html>
"""
