"""A virtual clock over `placement/`: what would become of a trace of jobs on these GPUs, under this policy.

    simulate(read_trace("jobs.csv"), Scenario(gpus="4xA100-40GB", policy="magm", sharing="mps"))

The decisions are made by the code that the manager runs. `trace` says what jobs come, `scenario` what they meet,
`engine` moves the clock, `result` says what became of them.
"""

from __future__ import annotations
