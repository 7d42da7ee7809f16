"""Results of simulations made by hand, for tests of what is done with them."""

from ullage.manager.simulation.result import GpuSeries, SimulatedAttempt, SimulatedJob, SimulationResult
from ullage.manager.simulation.scenario import Scenario
from ullage.performance.result import Utilization

GIB = 1 << 30
OOM = "out of GPU memory"


def utilization(gpu, step_s, gpu_s, power_w=400.0, **more):
    """What a job does alone on a GPU."""
    values = {"host_s": step_s / 2, "smact": 0.8, "smocc": 0.4, "drama": 0.2, "tensor": 0.1, "flops": 1.0, "bytes": 1.0}
    rest = {"energy_j": power_w * step_s, "kernels": 1, "steady": True, "measured": True}
    return Utilization(gpu=gpu, step_s=step_s, gpu_s=gpu_s, power_w=power_w, **values | rest | more)


def attempt(begin, end, gpus=(0,), cause="finished", promise=10 * GIB):
    return SimulatedAttempt(begin, end, tuple(gpus), promise, cause)


def job(number, arrival, *attempts, work_s=100.0, user="ann", kind="resnet50 b64", state="done", gpus=1):
    return SimulatedJob(number, kind, user, arrival, work_s, gpus, state, attempts)


def series(index, *moments, end):
    """A GPU with (time, jobs, memory, smact, watts) from each moment on."""
    rows = [*moments, (end, 0, 0, 0.0, 50.0)]
    times, jobs, memory, smact, power = (list(column) for column in zip(*rows, strict=True))
    return GpuSeries(index, "A100-40GB", 40 * GIB, times, jobs, memory, smact, power)


JOBS = (
    job(1, 10.0, attempt(10.0, 110.0)),
    job(2, 20.0, attempt(30.0, 40.0, cause=OOM), attempt(60.0, 260.0), user="bob", kind="<b>gpt2</b>"),
    job(3, 20.0, attempt(110.0, 310.0, gpus=(0, 1)), gpus=2),
    job(4, 25.0, attempt(30.0, 50.0, cause="GPU lost"), state="failed"),
    job(5, 30.0, state="waiting"),
)
GPUS = (
    series(0, (0.0, 0, 0, 0.0, 50.0), (10.0, 1, 10 * GIB, 0.5, 200.0), (110.0, 2, 20 * GIB, 1.0, 400.0), end=310.0),
    series(1, (0.0, 0, 0, 0.0, 50.0), (110.0, 1, 4 * GIB, 0.25, 100.0), end=310.0),
)


def run(label="magm, none, mps", jobs=JOBS, gpus=GPUS, **scenario):
    made = Scenario(gpus="2xA100-40GB", policy="magm", estimator="none", label=label, **scenario)
    return SimulationResult(made, "toy.csv", jobs, gpus, 131_000.0, 500.0, 0.4, 0.25, 9)
