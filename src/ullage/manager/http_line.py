"""The REST API from the other end: an order becomes a request, an answer what the daemon meant. No more than Python."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from ullage.errors import InvalidValue, NoDaemon
from ullage.manager.client import error_of

_LARGEST_ANSWER = 256 << 20
# By order: method, path, which arguments are in the query.
_ROUTES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "ping": ("GET", "/v1/ping", ()),
    "submit": ("POST", "/v1/jobs", ()),
    "queue": ("GET", "/v1/jobs", ("user",)),
    "status": ("GET", "/v1/jobs/{job}", ()),
    "logs": ("GET", "/v1/jobs/{job}/logs", ("attempt", "stream", "offset")),
    "cancel": ("POST", "/v1/jobs/{job}/cancel", ()),
    "hold": ("POST", "/v1/jobs/{job}/hold", ()),
    "release": ("POST", "/v1/jobs/{job}/release", ()),
    "history": ("GET", "/v1/history", ("limit", "user")),
    "gpus": ("GET", "/v1/gpus", ()),
    "drain": ("POST", "/v1/gpus/{gpu}/drain", ()),
    "resume": ("POST", "/v1/gpus/{gpu}/resume", ()),
    "events": ("GET", "/v1/events", ("since", "limit", "wait")),
}


class HttpLine:
    """Does orders over HTTP, as `ullage.manager.client.Client` does over the socket.

        HttpLine("http://127.0.0.1:8600", token).call("status", job=17)

    Not covered: proxies.
    """

    def __init__(self, url: str, token: str, timeout: float = 60.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not token.isprintable():
            raise InvalidValue(f"needed a URL such as http://127.0.0.1:8600 and a token; found {url[:80]!r}")
        self._parts, self._token, self._timeout = parts, token.strip(), timeout

    def call(self, verb: str, wait: float = 0.0, **arguments: Any) -> Any:
        """Ask, and give what was answered."""
        if verb not in _ROUTES:
            raise InvalidValue(f"the API has no {verb!r}; it has {', '.join(_ROUTES)}")
        if verb in ("cancel", "hold", "release"):
            return [done for job in arguments["jobs"] for done in self._one(verb, {"job": job}, 0.0)]
        return self._one(verb, arguments, wait)

    def close(self) -> None:
        """Nothing is held open."""

    def _one(self, verb: str, arguments: dict[str, Any], wait: float) -> Any:
        method, path, in_query = _ROUTES[verb]
        given = {**arguments, **({"wait": wait} if wait else {})}
        query = {name: given.pop(name) for name in in_query if given.get(name) is not None}
        for name in [name for name in given if f"{{{name}}}" in path]:
            path = path.replace(f"{{{name}}}", quote(str(given.pop(name)), safe=""))
        body = json.dumps(given).encode() if method == "POST" and verb not in ("cancel", "hold", "release") else None
        return self._request(method, path + (f"?{urlencode(query)}" if query else ""), body, wait)

    def _request(self, method: str, path: str, body: bytes | None, wait: float) -> Any:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout + wait)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            content = answer.read(_LARGEST_ANSWER)
            found = json.loads(content)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoDaemon(f"no daemon answers at {self._parts.geturl()}: {error or type(error).__name__}") from None
        finally:
            connection.close()
        if answer.status >= 400:
            raise error_of(str(found.get("error")), str(found.get("message")))
        return found
