"""What the documents behind Ullage describe, step by step, without a GPU: `make seeds`.

    python benchmarks/dissertation/seeds.py --speed 120 --seeds 10

It shows the authors' traces and job files, estimates a job by its summary, overbooks a GPU until jobs crash and
recover, simulates all policies, and prints Tables 6.3 to 6.6 of the dissertation: executed by daemons on virtual GPUs,
simulated, and published. Seven rows run at a time: a quarter of an hour at 120x. `--compare 20,60,120` only runs a
few rows at these speeds, to see what compression distorts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from collocation import table
from rad_rm import GPUS, SHARED_S, WINDOW_S
from reproduction import CHAPTER, EXCLUSIVE, FILES, ROOT, Done, Run, simulated, source_of
from ullage.cli.trace_runs import execute
from ullage.errors import NoDaemon, UllageError
from ullage.manager.client import Client
from ullage.manager.simulation.result import Figures

POLICIES = "exclusive,round-robin,magm,lug,mug,first-fit,best-fit,worst-fit,least-utilized,ullage"
TABLES = {
    "6.3": ("unknown", "ooms"),
    "6.4": ("estimators", "ooms"),
    "6.5": ("heavy", "ooms"),
    "6.6": ("heavy", "energy"),
}
COMPARED = ("RR", "MAGM (80%, 2 GB)", "MAGM + GPUMemNet (80%)")  # rows of Table 6.5 for --compare
Key = tuple[str, str]  # trace and name of a run
DISTORTED = """Executed runs are {:g} times faster than the trace, and do not block the queue after a crash as RAD-RM
does. Starts of processes and the daemon's steps take as long as ever. In the last comparison, on two busy cores, totals
were 2 to 4 % longer at 60x than at 20x, and 5 to 10 % at 120x; where dozens of jobs crash, runs differ by more."""
AT_ONCE = 7
_STARTING = threading.Lock()  # daemons start one after the other
_STOPPED = threading.Event()


def settings(run: Run, speed: float) -> str:
    """Return the settings of a daemon that are the run's rules, with all times divided by the speed."""
    rules = run.scenario.rules
    limit = '"off"' if rules.smact_limit is None else rules.smact_limit
    window = WINDOW_S / speed
    lines = [
        "[monitoring]",
        f"interval = {max(0.05, window / 6)}",
        f"window = {max(0.05, window)}",
        "[placing]",
        f"smact_limit = {limit}",
        f"free_floor = {rules.free_floor}",
        f"margin = {rules.margin}",
        'unknown = "floor"\nfresh_busy = 0\nbackfill = false',
        "[recovering]\nexclusive_after = 1\n",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def daemon(policy: str, text: str, pause_s: float = 0.0, *more: str):
    """Run a daemon of virtual GPUs in a home of its own, and yield the home."""
    with tempfile.TemporaryDirectory(prefix="ullage-seeds-") as folder:
        site = Path(folder, "site.toml")
        site.write_text(text)
        command = [sys.executable, "-m", "ullage", "serve", "--virtual", GPUS, "--policy", policy]
        environment = {**os.environ, "ULLAGE_HOME": folder, "RAD_RM_PAUSE_S": str(pause_s)}
        with Path(folder, "log").open("wb") as log, _STARTING:
            process = subprocess.Popen(
                [*command, "--settings", str(site), *more], env=environment, stdout=log, stderr=log
            )
            while not _answers(folder):
                if process.poll() is not None:
                    raise SystemExit(f"the daemon did not start: {Path(folder, 'log').read_text()[-500:]}")
                time.sleep(0.05)
        try:
            yield Path(folder)
        finally:
            with contextlib.suppress(UllageError), Client(folder) as client:
                client.cancel(*[job["id"] for job in client.queue()])
            process.send_signal(signal.SIGINT)
            process.wait(60)


def _answers(folder: str) -> bool:
    with contextlib.suppress(NoDaemon), Client(folder) as client:
        return bool(client.ping())
    return False


def key(run: Run) -> Key:
    """Return what tells runs apart, also those that several tables have."""
    return run.trace, run.name


def executed(run: Run, speed: float) -> Figures:
    """Run a row of a table on a daemon, and return its figures in the time of the trace."""
    alone = run.name == EXCLUSIVE
    estimator = "none" if alone else run.scenario.estimator
    serving = daemon(run.scenario.policy, settings(run, speed), SHARED_S / speed, "--estimator", "none")
    with serving as home, Client(home) as client:
        return execute(source_of(FILES, run.trace).read(0), client, speed, estimator, _go_on).figures


def _go_on(submitted: int, over: int) -> None:
    if _STOPPED.is_set():
        raise KeyboardInterrupt


def all_executed(runs: Sequence[Run], speed: float) -> dict[Key, Figures]:
    """Run some rows at a time: they wait most of the time."""
    began, wanted = time.monotonic(), {key(run): run for run in runs}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = pool.map(lambda run: executed(run, speed), wanted.values())
        try:
            figures = dict(zip(wanted, running, strict=True))
        except BaseException:
            _STOPPED.set()  # the pool waits for its threads
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    print(f"\n{len(wanted)} runs at {speed:g}x took {(time.monotonic() - began) / 60:.1f} min", flush=True)
    return figures


# Tables.


def three_columns(section: Sequence[Done], ran: Mapping[Key, Figures], measure: str) -> str:
    """Return a table of a measure and of the total time: executed, simulated and published."""
    unit, digits = {"ooms": ("crashes", 1), "energy": ("energy, MJ", 1)}[measure]
    head = ["run", f"{unit}: executed", "simulated", "published", "total, min: executed", "simulated"]
    rows = []
    for done in section:
        figures, theirs = ran.get(key(done.run)), done.run.theirs.get(measure)
        crashes = figures and (f"{figures.ooms}" if measure == "ooms" else f"{figures.energy_j / 1e6:.1f}")
        total = figures and f"{figures.total_s / 60:.0f}"
        published = "" if theirs is None else f"{theirs:.{0 if measure == 'ooms' else 1}f}"
        rows.append(
            [done.run.name, crashes or "", done.spread(measure, digits), published, total or "", done.spread("total")]
        )
    return table(head, rows)


def compare(speeds: Sequence[float]) -> None:
    """Print how some rows differ with the speed."""
    rows = []
    runs = [run for run in CHAPTER["heavy"]() if run.name in COMPARED]
    for speed in speeds:
        for (_, name), figures in all_executed(runs, speed).items():
            minutes = [f"{(value or 0) / 60:.0f}" for value in (figures.total_s, figures.waiting_s, figures.running_s)]
            rows.append([name, f"{speed:g}x", *minutes, str(figures.ooms), str(figures.done)])
    print(table(["run", "speed", "total, min", "waiting", "running", "crashes", "done"], sorted(rows)))


# Steps.


def step(title: str, *commands: str, home: Path | None = None) -> None:
    """Print a title and run commands of Ullage, with their output."""
    print(f"\n## {title}\n", flush=True)
    for command in commands:
        print(f"$ {command}", flush=True)
        words = [sys.executable, "-m", *shlex.split(command)]
        environment = os.environ if home is None else {**os.environ, "ULLAGE_HOME": str(home)}
        if subprocess.run(words, cwd=ROOT, env=environment).returncode:
            raise SystemExit(f"this step failed: {command}")


def show_steps(speed: float, seeds: int) -> None:
    heavy = FILES.relative_to(ROOT) / "philly_heavy-60-tasks.sh"
    step("The authors' trace of 60 jobs, from the .sh and .rad files", f"ullage trace {heavy}")
    with daemon("magm", "[estimating]\nwait = true\n") as home:
        file = FILES.relative_to(ROOT) / "resnet2.rad"
        estimated = [f"ullage submit {file} -e {name} --hold --estimate-wait 2m" for name in ("horus", "gpumemnet")]
        step("A job's memory by its summary, for the promise", *estimated, "ullage queue", home=home)
    overbooking = '[placing]\nunknown = "floor"\nfree_floor = 0\nmargin = 0\n[recovering]\nexclusive_after = 1\n'
    with daemon("round-robin", overbooking) as home:
        title = "Overbooked GPUs: jobs run out of memory and recover on a GPU of their own"
        step(title, f"ullage trace {heavy} --limit 20 --run --speed {4 * speed:g}x -e none", home=home)
    simulated_words = f"--gpus {GPUS} --estimator gpumemnet --sharing mps --seeds {seeds}"
    step("All policies on this trace, simulated", f"ullage simulate {heavy} --policy {POLICIES} {simulated_words}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    speed = os.environ.get("SPEED", "120")
    parser.add_argument("--speed", type=float, default=speed, help=f"of executed runs (default: {speed})")
    parser.add_argument("--seeds", type=int, default=10, help="of simulated runs (default: 10)")
    parser.add_argument("--compare", metavar="SPEEDS", help="only compare these speeds, such as 20,60,120")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    options = parser.parse_args(arguments)
    if options.compare:
        compare([float(speed) for speed in options.compare.split(",")])
        return
    show_steps(options.speed, options.seeds)
    print("\n## Tables 6.3 to 6.6\n", flush=True)
    sections = simulated(FILES, options.seeds, len(os.sched_getaffinity(0)), None, ("unknown", "estimators", "heavy"))
    # Not on virtual GPUs: jobs that take turns, and the longest run, whose outcome is known.
    runs = [done.run for section in sections.values() for done in section if done.run.scenario.sharing == "mps"]
    wanted = [run for run in runs if key(run) != ("90", EXCLUSIVE)]
    ran = all_executed(wanted, options.speed)
    texts = [
        f"### Table {name}\n\n{three_columns(sections[part], ran, measure)}\n"
        for name, (part, measure) in TABLES.items()
    ]
    print("\n".join([*texts, DISTORTED.format(options.speed)]))
    if options.out is not None:
        options.out.write_text("\n".join(texts))


if __name__ == "__main__":
    main()
