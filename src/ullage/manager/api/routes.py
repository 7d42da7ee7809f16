"""The routes of the HTTP API, made from the table of verbs, and their description in OpenAPI 3.1."""

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, TypeAdapter

import ullage
from ullage.manager.core.orders import Orders, arguments_model, parameters_of
from ullage.manager.transport import LONGEST_WAIT
from ullage.manager.verbs import VERBS, JobReference, Verb

STREAM = "/v1/events/stream"
_PROBLEMS = {
    400: "what was asked for cannot be done",
    401: "no token, or none of this daemon",
    403: "another user's job, or an order for operators",
    404: "no such job",
    408: "the request did not come in time",
    413: "more than the API reads",
    422: "the request cannot be read",
    429: "too many requests of one user at a time",
    503: "the daemon is ending",
    507: "the disk is full: nothing was changed",
}
_TEXTS = {"/metrics": "text/plain", STREAM: "text/event-stream"}  # by path; all others answer in JSON


class Route(NamedTuple):
    """A verb's path, and the places of its arguments, by name, type and default."""

    verb: str
    kind: Verb
    in_path: dict[str, tuple[Any, Any]]
    in_query: dict[str, tuple[Any, Any]]
    in_body: dict[str, tuple[Any, Any]]
    checks: type[BaseModel]  # all of them
    names_one: bool  # whether the path names one of the verb's `jobs`


def routes() -> list[Route]:
    made = [_route("events", VERBS["events"]._replace(path=STREAM, waits=False), ["limit"])]
    for verb, kind in VERBS.items():
        made.append(_route(verb, kind))
        if made[-1].names_one:
            made.append(_route(verb, kind._replace(path=kind.path.replace("/{job}", ""), body="")))
    return made


def _route(verb: str, kind: Verb, without: Collection[str] = ()) -> Route:
    arguments = {name: each for name, each in parameters_of(verb).items() if name not in without}
    names_one = "jobs" in arguments and "{job}" in kind.path
    if names_one:
        del arguments["jobs"]
        arguments["job"] = (JobReference, ...)
    in_path = {name: each for name, each in arguments.items() if f"{{{name}}}" in kind.path}
    others = {name: each for name, each in arguments.items() if name not in in_path}
    reads = kind.method in ("GET", "DELETE")
    wait = Annotated[float, Field(ge=0, le=LONGEST_WAIT, description="seconds to wait for it")]
    in_query = (others if reads else {}) | ({"wait": (wait, 0.0)} if kind.waits else {})
    checks = arguments_model(verb, {**arguments, **in_query})
    return Route(verb, kind, in_path, in_query, {} if reads else others, checks, names_one)


def description(routes: Sequence[Route]) -> dict[str, Any]:
    """Describe these routes, except those of the Unix socket."""
    from ullage.manager.api.shapes import ANSWERS, ProblemAnswer  # slow to import

    routes = [route for route in routes if not route.kind.local]
    adapters: list[Any] = [("problem", "serialization", TypeAdapter(ProblemAnswer))]
    for number, route in enumerate(routes):
        for name, (hint, default) in (route.in_path | route.in_query).items():
            hint = hint if default is ... else Annotated[hint, Field(default=default)]
            adapters.append(((number, name), "validation", TypeAdapter(hint)))
        if route.in_body:
            adapters.append(((number, "its body"), "validation", TypeAdapter(_body(route))))
        adapters.append(((number, "its answer"), "serialization", TypeAdapter(ANSWERS.get(route.verb, Any))))
    made, definitions = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    schemas = {key: schema for (key, _), schema in made.items()}
    paths: dict[str, dict[str, Any]] = {}
    for number, route in enumerate(routes):
        of_route = {key[1]: schema for key, schema in schemas.items() if key[0] == number}
        paths.setdefault(route.kind.path, {})[route.kind.method.lower()] = _operation(
            route, of_route, schemas["problem"]
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Ullage",
            "version": ullage.__version__,
            "description": "Many jobs on shared GPUs. Every request needs the header `Authorization: Bearer TOKEN`.",
        },
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"HTTPBearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _body(route: Route) -> Any:
    if route.kind.body:
        return route.in_body[route.kind.body][0]
    return arguments_model(_id(route), route.in_body)


def _id(route: Route) -> str:
    return re.sub(r"\W+", "_", f"{route.verb}{route.kind.path}_{route.kind.method.lower()}")


def _operation(route: Route, schemas: dict[Any, Any], problem: dict[str, Any]) -> dict[str, Any]:
    kind, content = route.kind, _TEXTS.get(route.kind.path, "application/json")
    parameters = [
        {
            "name": name,
            "in": "path" if name in route.in_path else "query",
            "required": name in route.in_path,
            "schema": schemas[name],
        }
        for name in (*route.in_path, *route.in_query)
    ]
    answers: dict[str, Any] = {
        str(status): {"description": text, "content": {"application/json": {"schema": problem}}}
        for status, text in _PROBLEMS.items()
    }
    text = {"type": "string"} if content != "application/json" else schemas["its answer"]
    answers[str(kind.status)] = {"description": "what was done or found", "content": {content: {"schema": text}}}
    operation = {
        "operationId": _id(route),
        "tags": [kind.path.split("/")[min(2, kind.path.count("/"))]],
        "summary": route.verb.replace("_", " "),
        "description": getattr(Orders, route.verb).__doc__,
        "security": [{"HTTPBearer": []}],
        "parameters": parameters,
        "responses": answers,
    }
    if route.in_body:
        required = any(default is ... for _, default in route.in_body.values())
        of_json = {"application/json": {"schema": schemas["its body"]}}
        operation["requestBody"] = {"required": required, "content": of_json}
    return operation
