"""One estimate in this very process, for `ullage.research.measure.runs`: the order on standard input, a line of JSON
out."""

from __future__ import annotations

from typing import Any

from ullage.estimation.running import estimate_configuration, estimate_on_virtual_gpu
from ullage.research.measure.runs import ESTIMATED, answer_order
from ullage.workloads import Configuration


def estimate_here(order: dict[str, Any]) -> dict[str, Any]:
    """The figures of the estimate that a file of measured runs keeps."""
    if order.get("script"):
        found = estimate_on_virtual_gpu(order["script"], gpu=order["gpu"], args=order["args"], module=order["module"])
    else:
        found = estimate_configuration(Configuration.from_row(order["row"]), gpu=order["gpu"])
    values = {**found.to_dict(timeline=False), "context": found.breakdown["context"]}
    return {name: values[name] for name in ESTIMATED}


if __name__ == "__main__":
    answer_order(estimate_here)
