"""How the end of a job is told: by a command, with the rights of the user who named it. Each may take seconds, so no
loop calls this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ullage.sandbox.environment import environment
from ullage.sandbox.limits import Limits
from ullage.sandbox.parent import run
from ullage.units import GIB

_COMMAND = "ullage.sandbox.child:run_command"


class DeliveryResult(NamedTuple):
    """Whether it was delivered, and what is known of it."""

    done: bool
    text: str


def by_command(
    command: Sequence[str],
    facts: Mapping[str, Any],
    env: Mapping[str, str],
    cwd: str | None,
    rights: Mapping[str, int | str],
    seconds: float,
) -> DeliveryResult:
    """Run a command. One that ran is not run again, whatever came of it."""
    request = {"command": list(command), "text": json.dumps(facts), "env": dict(env) | variables(facts)}
    limits = Limits(seconds=seconds, memory=4 * GIB, processes=256)
    outcome = run(_COMMAND, request, limits=limits, env=environment(env), cwd=cwd, rights=rights or None)
    if outcome.answer is None:
        return DeliveryResult(False, f"{command[0]}: {'' if outcome.reason == 'error' else 'it '}{outcome.failure}")
    if "failed" in outcome.answer:
        return DeliveryResult(False, outcome.answer["failed"])
    return DeliveryResult(True, f"{command[0]}: exit code {outcome.answer['code']}")


def variables(facts: Mapping[str, Any]) -> dict[str, str]:
    """The facts as environment variables; what is unknown is empty."""
    return {f"ULLAGE_END_{name.upper()}": "" if value is None else str(value) for name, value in facts.items()}
