"""One estimate in this very process, for `ullage.measure.runs`: the order on standard input, a line of JSON out."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Any

from ullage.estimate.dispatch import estimate, estimate_configuration
from ullage.measure.runs import ESTIMATED
from ullage.workload import Configuration


def estimate_here(order: dict[str, Any]) -> dict[str, Any]:
    """The figures of the estimate that a file of measured runs keeps."""
    if order.get("script"):
        found = estimate(order["script"], gpu=order["gpu"], args=order["args"], module=order["module"])
    else:
        found = estimate_configuration(Configuration.from_row(order["row"]), gpu=order["gpu"])
    values = {**found.to_dict(timeline=False), "context": found.breakdown["context"]}
    return {name: values[name] for name in ESTIMATED}


def main() -> None:
    """Read the order, estimate, print."""
    order = json.load(sys.stdin)
    try:
        with redirect_stdout(sys.stderr):
            answer = estimate_here(order)
    except Exception as error:
        answer = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:500]}
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
