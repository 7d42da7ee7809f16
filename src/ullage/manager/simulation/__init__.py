"""A virtual clock over `placement/`: what would become of a trace of jobs on these GPUs, under this policy.

    simulate(read_trace("jobs.csv"), Scenario(gpus="4xA100-40GB", policy="magm", sharing="mps"))

The decisions are made by the code that the manager runs. `trace` says what jobs come, `scenario` what they meet,
`engine` moves the clock, `result` says what became of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage.manager.simulation.asking import replay, simulate, sweep
    from ullage.manager.simulation.formats.own import write_trace
    from ullage.manager.simulation.generator import generate_trace
    from ullage.manager.simulation.reading import read_trace
    from ullage.manager.simulation.result import SimulationResult
    from ullage.manager.simulation.sweeps import SweepRow
    from ullage.manager.simulation.trace import JobKind, JobTrace, TraceJob

_HOMES = {
    "JobKind": "trace",
    "JobTrace": "trace",
    "SimulationResult": "result",
    "SweepRow": "sweeps",
    "TraceJob": "trace",
    "generate_trace": "generator",
    "read_trace": "reading",
    "replay": "asking",
    "simulate": "asking",
    "sweep": "asking",
    "write_trace": "formats.own",
}

__all__ = [
    "JobKind",
    "JobTrace",
    "SimulationResult",
    "SweepRow",
    "TraceJob",
    "generate_trace",
    "read_trace",
    "replay",
    "simulate",
    "sweep",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
