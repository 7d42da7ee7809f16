"""Simulates a trace of jobs on shared GPUs under a policy, with `placement/` and a virtual clock.

    simulate(read_trace("jobs.csv"), Scenario(gpus="4xA100-40GB", policy="magm", sharing="mps"))

The code of the manager makes the decisions. `trace` has the jobs, `scenario` the GPUs, policy and world, `engine` the
clock, and `result` the outcome.
"""

from typing import TYPE_CHECKING

from ullage.lazy import loaded_on_first_use

if TYPE_CHECKING:
    from ullage.manager.simulation.asking import replay as replay
    from ullage.manager.simulation.asking import simulate as simulate
    from ullage.manager.simulation.asking import sweep as sweep
    from ullage.manager.simulation.formats.own import write_trace as write_trace
    from ullage.manager.simulation.generator import generate_trace as generate_trace
    from ullage.manager.simulation.reading import read_trace as read_trace
    from ullage.manager.simulation.result import SimulationResult as SimulationResult
    from ullage.manager.simulation.sweeps import SweepRow as SweepRow
    from ullage.manager.simulation.trace import JobKind as JobKind
    from ullage.manager.simulation.trace import JobTrace as JobTrace
    from ullage.manager.simulation.trace import TraceJob as TraceJob

_LAZY_IMPORTS = {
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

__all__ = [*_LAZY_IMPORTS]
__getattr__ = loaded_on_first_use(__name__, _LAZY_IMPORTS)
