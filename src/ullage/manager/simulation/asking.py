"""The Python API of the simulator: `simulate` a trace, `replay` a manager's history, `sweep` over scenarios."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ullage.manager.placement.custom_policies import Choice, custom_policy
from ullage.manager.policy_files import load_policy
from ullage.manager.simulation import engine
from ullage.manager.simulation.history import as_it_was, read_history, scenario_of_history, trace_of_history
from ullage.manager.simulation.reading import read_trace
from ullage.manager.simulation.result import SimulationResult
from ullage.manager.simulation.scenario import Scenario, variants
from ullage.manager.simulation.sweeps import SweepRow, TraceSource, cases, run_cases, summarize
from ullage.manager.simulation.trace import JobTrace


def simulate(
    trace: str | Path | JobTrace,
    *,
    gpus: str,
    policy: str | Choice = "ullage",
    estimator: str = "ullage",
    sharing: str = "mps",
    seed: int = 0,
    format: str | None = None,
    mix: str = "mixed",
    progress: engine.Progress | None = None,
    **settings: Any,
) -> SimulationResult:
    """Simulate a trace of jobs on shared GPUs, with the placement code of `ullage serve`.

    Args:
        trace: A trace file in any known format, or a `JobTrace`.
        gpus: The GPUs, such as "4xA100-40GB" or "8xH200, 4xT4".
        policy: The policy that chooses GPUs, as in `ullage serve`: a name, "FILE.py:FUNCTION", or a function
            `choose(job, gpus, now)`.
        estimator: The estimator whose estimates are promised: "ullage" or another one, "oracle" for true memory, or
            "none". It estimates the jobs for which the trace has no estimate.
        sharing: How jobs share a GPU: "mps", "time-slicing", "mig" (or with the instances, "mig:2g.10gb") or "off".
        seed: The seed of all random numbers.
        format: The format of the file. Default: recognised from its beginning.
        mix: The mix of known workloads, for traces that do not name their training jobs.
        progress: Called now and then with the number of finished jobs and the number of all jobs.
        **settings: Any other setting of a scenario, of its rules or of its world, by its name, such as `smact_limit`,
            `free_floor`, `margin`, `unknown`, `min_speed`, `interference`, `startup_s` or `label`.

    Returns:
        The outcome of every job and every GPU; `figures` sums it up, in seconds and joules.

    >>> from ullage.manager.simulation import generate_trace
    >>> result = simulate(generate_trace(20), gpus="4xA100-40GB", policy="magm", smact_limit=0.8)
    >>> len(result.jobs), result.figures.ooms
    (20, 0)
    """
    chosen = load_policy(policy) if isinstance(policy, str) else custom_policy(policy.__name__, policy)
    name = policy if isinstance(policy, str) else chosen.name
    scenario = Scenario(gpus=gpus, policy=name, estimator=estimator, sharing=sharing, seed=seed).but(**settings)
    jobs = trace if isinstance(trace, JobTrace) else read_trace(trace, format=format, mix=mix, seed=seed)
    return engine.simulate(jobs, scenario, progress, chosen)


def replay(history: str | Path | Mapping[str, Any], **settings: Any) -> tuple[SimulationResult, SimulationResult]:
    """Simulate a manager's history, with its GPUs, policy, rules and promises unless you give others.

    Args:
        history: The answer of `Client.trace()`, or a file that `ullage simulate --from-history --save-history` wrote.
        **settings: As for `simulate`: `gpus`, `policy`, `sharing`, `estimator` ("promised", "oracle" or "none"),
            `smact_limit`, `startup_s` and so on.

    Returns:
        The run as it was, and the simulation.
    """
    recorded = history if isinstance(history, Mapping) else read_history(Path(history))
    scenario = scenario_of_history(recorded, settings.get("policy")).but(**settings)
    startup_s = scenario.world.startup_s
    return as_it_was(recorded, startup_s=startup_s), engine.simulate(
        trace_of_history(recorded, startup_s=startup_s), scenario
    )


def sweep(
    traces: str | Path | Mapping[str, Any] | Sequence[str | Path | Mapping[str, Any]],
    *,
    gpus: str | Sequence[str],
    seeds: int = 1,
    seed: int = 0,
    workers: int = 1,
    resume: str | Path | None = None,
    **settings: Any,
) -> list[SweepRow]:
    """Simulate every combination of settings on the same traces and seeds, with confidence intervals over the seeds.

    Args:
        traces: Trace files in any known format, or arguments of `generate_trace` without the seed.
        gpus: As for `simulate`; a list stands for several choices.
        seeds: The number of seeds; each seeds the trace and the simulated world.
        seed: The first seed.
        workers: The number of processes; above 1 a script needs `if __name__ == "__main__":`.
        resume: A file of figures to reuse; new figures are added to it.
        **settings: As for `simulate`; a list stands for several choices.

    Returns:
        A row for each scenario on each trace: `figures` and `changes` against the first scenario, as intervals.

    >>> rows = sweep({"jobs": 20}, gpus="4xA100-40GB", policy=["exclusive", "magm"], seeds=2)
    >>> rows[1].changes["total"].mean < 0  # magm is done sooner than exclusive
    True
    """
    given = [traces] if isinstance(traces, str | Path | Mapping) else traces
    sources = [
        TraceSource(drawn=tuple(each.items())) if isinstance(each, Mapping) else TraceSource(str(each))
        for each in given
    ]
    choices = {
        name: value if isinstance(value, list | tuple) else [value]
        for name, value in (settings | {"gpus": gpus}).items()
    }
    scenarios = variants(Scenario(gpus=choices["gpus"][0]), choices)
    wanted = cases(sources, scenarios, range(seed, seed + seeds))
    return summarize(wanted, run_cases(wanted, workers, None if resume is None else Path(resume)))
