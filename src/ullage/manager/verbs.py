"""The orders of a daemon, for the socket, the HTTP API and clients. A verb's arguments are the parameters of its
method in `Orders`."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Verb(NamedTuple):
    """The scope that a verb needs, how the daemon does it (changes in a transaction, long answers in a reading
    thread), and its place in the HTTP API."""

    scope: Literal["read", "submit", "operate"]
    how: Literal["at once", "changes", "long"] = "at once"
    method: str = ""
    path: str = ""
    query: tuple[str, ...] = ()  # which arguments are in the query
    body: str = ""  # which argument is the whole body, where it is not one of several


VERBS = {
    "ping": Verb("read", "at once", "GET", "/v1/ping"),
    "submit": Verb("submit", "changes", "POST", "/v1/jobs"),
    "dry_run": Verb("submit", "changes", "POST", "/v1/dry-run"),
    "queue": Verb("read", "long", "GET", "/v1/jobs", ("user", "limit", "offset")),
    "folded_queue": Verb("read", "long", "GET", "/v1/queue", ("user", "limit", "offset", "live")),
    "status": Verb("read", "long", "GET", "/v1/jobs/{job}"),
    "memory": Verb("read", "long", "GET", "/v1/jobs/{job}/memory"),
    "history": Verb("read", "long", "GET", "/v1/history", ("limit", "user")),
    "logs": Verb("read", "at once", "GET", "/v1/jobs/{job}/logs", ("attempt", "stream", "offset", "tail")),
    "attach": Verb("submit"),
    "cancel": Verb("submit", "changes", "POST", "/v1/jobs/{job}/cancel"),
    "hold": Verb("submit", "changes", "POST", "/v1/jobs/{job}/hold"),
    "release": Verb("submit", "changes", "POST", "/v1/jobs/{job}/release"),
    "edit": Verb("submit", "changes", "PATCH", "/v1/jobs/{job}", body="changes"),
    "requeue": Verb("submit", "changes", "POST", "/v1/jobs/{job}/requeue"),
    "estimate": Verb("submit", "changes", "POST", "/v1/estimates", ("wait",), body="question"),
    "estimates": Verb("read", "long", "GET", "/v1/estimates", ("limit",)),
    "estimated": Verb("read", "long", "GET", "/v1/estimates/{estimate}", ("wait",)),
    "cancel_estimate": Verb("submit", "changes", "POST", "/v1/estimates/{estimate}/cancel"),
    "gpus": Verb("read", "at once", "GET", "/v1/gpus"),
    "drain": Verb("operate", "changes", "POST", "/v1/gpus/{gpu}/drain"),
    "resume": Verb("operate", "changes", "POST", "/v1/gpus/{gpu}/resume"),
    "events": Verb("read", "long", "GET", "/v1/events", ("since", "limit", "wait")),
    "report": Verb("read", "long", "GET", "/v1/report", ("by", "since", "until", "user")),
    "trace": Verb("read", "long", "GET", "/v1/trace", ("since", "until", "user", "there")),
    "figures": Verb("read", "long"),
    "tokens": Verb("read", "at once", "GET", "/v1/tokens", ("everybody",)),
    "token_create": Verb("operate", "changes", "POST", "/v1/tokens"),
    "token_revoke": Verb("operate", "changes", "DELETE", "/v1/tokens/{token}"),
    "api": Verb("operate"),
    "stop_serving": Verb("operate"),
}
