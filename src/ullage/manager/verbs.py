"""The table of verbs: the orders to a daemon, and the HTTP request of each.

The daemon serves this table, on its Unix socket and on TCP, and clients make their requests from it. A verb is a method
of `Orders`: its parameters are the verb's arguments, with their types and limits, and its docstring describes it.
Arguments that are also options of the command line are defined here, so that both have the same help and limits.
"""

from typing import Annotated, Literal, NamedTuple, get_args

from pydantic import Field

Scope = Literal["read", "submit", "operate"]
SCOPES: tuple[Scope, ...] = get_args(Scope)  # each includes those before it
MOST_ROWS = 100_000
JobReference = Annotated[str | int, Field(description="Job number (17), array job (12_3), array (12_all) or name.")]
GPUReference = Annotated[str | int, Field(description="GPU index or UUID.")]
User = Annotated[str | None, Field(max_length=200, description="Show only this user's jobs.")]
Rows = Annotated[int, Field(ge=1, le=MOST_ROWS, description="Maximum number of rows.")]
Attempt = Annotated[int | None, Field(ge=1, le=2**31, description="Attempt to print.")]
Reason = Annotated[str, Field(max_length=200, description="Reason to show in 'ullage queue --show-gpus'.")]
_ALLOWED = Field(max_length=1000, description="User or group that may still start jobs.")
Allowed = Annotated[list[Annotated[str, Field(max_length=200)]] | None, _ALLOWED]
Later = Annotated[bool, Field(description="Also cancel drains that have not begun.")]
Everybody = Annotated[bool, Field(description="Show the tokens of all users (operators only).")]
TokenName = Annotated[str, Field(max_length=80, description="Name of the token.")]
_RIGHTS = "Rights: read (see jobs and GPUs), submit (also submit and change jobs) or operate (all of yours)."
TokenScope = Annotated[Scope, Field(description=_RIGHTS)]
Owner = Annotated[str | None, Field(max_length=200, description="User of the token (operators only).")]


class Verb(NamedTuple):
    """A verb: the scope that it requires, how the daemon runs it (changes in a transaction, long answers in a reading
    thread), and its request.

    The path names some arguments; the others are in the query of a GET or DELETE and in the body otherwise. A verb
    for `jobs` has a second path without `{job}`, whose body names several of them.
    """

    scope: Scope
    how: Literal["at once", "changes", "long"]
    method: Literal["GET", "POST", "PATCH", "DELETE"]
    path: str
    body: str = ""  # the argument that is the whole body, if there is one
    waits: bool = False  # whether the query may have `wait`, the seconds that the answer may take
    status: int = 200
    local: bool = False  # whether only the Unix socket serves it


VERBS = {
    "ping": Verb("read", "at once", "GET", "/v1/ping"),
    "submit": Verb("submit", "changes", "POST", "/v1/jobs", status=201),
    "dry_run": Verb("submit", "changes", "POST", "/v1/dry-run"),
    "queue": Verb("read", "long", "GET", "/v1/jobs"),
    "folded_queue": Verb("read", "long", "GET", "/v1/queue"),
    "status": Verb("read", "long", "GET", "/v1/jobs/{job}"),
    "memory": Verb("read", "long", "GET", "/v1/jobs/{job}/memory"),
    "history": Verb("read", "long", "GET", "/v1/history"),
    "logs": Verb("read", "at once", "GET", "/v1/jobs/{job}/logs"),
    "attach": Verb("submit", "at once", "GET", "/v1/jobs/{job}/attach", local=True),
    "cancel": Verb("submit", "changes", "POST", "/v1/jobs/{job}/cancel"),
    "hold": Verb("submit", "changes", "POST", "/v1/jobs/{job}/hold"),
    "release": Verb("submit", "changes", "POST", "/v1/jobs/{job}/release"),
    "edit": Verb("submit", "changes", "PATCH", "/v1/jobs/{job}", body="changes"),
    "requeue": Verb("submit", "changes", "POST", "/v1/jobs/{job}/requeue"),
    "estimate": Verb("submit", "changes", "POST", "/v1/estimates", body="question", waits=True, status=201),
    "estimates": Verb("read", "long", "GET", "/v1/estimates"),
    "estimated": Verb("read", "long", "GET", "/v1/estimates/{estimate}", waits=True),
    "cancel_estimate": Verb("submit", "changes", "POST", "/v1/estimates/{estimate}/cancel"),
    "gpus": Verb("read", "at once", "GET", "/v1/gpus"),
    "drain": Verb("operate", "changes", "POST", "/v1/gpus/{gpu}/drain"),
    "resume": Verb("operate", "changes", "POST", "/v1/gpus/{gpu}/resume"),
    "events": Verb("read", "long", "GET", "/v1/events", waits=True),
    "report": Verb("read", "long", "GET", "/v1/report"),
    "trace": Verb("read", "long", "GET", "/v1/trace"),
    "figures": Verb("read", "long", "GET", "/metrics"),
    "tokens": Verb("read", "at once", "GET", "/v1/tokens"),
    "token_create": Verb("operate", "changes", "POST", "/v1/tokens", status=201),
    "token_revoke": Verb("operate", "changes", "DELETE", "/v1/tokens/{token}"),
    "api": Verb("operate", "at once", "GET", "/v1/api", local=True),
    "stop_serving": Verb("operate", "at once", "POST", "/v1/stop", local=True),
}
