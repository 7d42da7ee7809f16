"""The options of `ullage submit` and `ullage edit`, which set fields of `JobSpec`."""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated, Any

from ullage.cli import completion
from ullage.cli.options import START_FORMS, Options, option

NONE = "none"  # resets a value
RESOURCES, SCHEDULE, RUN = "Resources", "When it runs", "How it runs"
_DAEMON = "set by the daemon"
_ARRAY = "Submit a job per index: 1-20, 0-10:2 or 1,5,7; %8 runs 8 at a time. {index} in the command is the index."
_AFTER = "Start after job 17 succeeds (17) or ends (any:17); also 12_3, 12_all, 12_{index} or a name. Can be repeated."
_OUTPUT = "Write output to this file: %j is the job, %A array, %a index, %t attempt, %n name, %u user."

# By group and field: the help, the spelling, and the default in words.
_OPTIONS: dict[str | None, dict[str, tuple[str, ...]]] = {
    None: {
        "name": ("Name of the job.", "--name -N NAME"),
        "interactive": ("Run at a terminal and connect to it. Without a command: your shell.", "--interactive -i"),
    },
    RESOURCES: {
        "gpus": ("Number of GPUs; 0 for none.", "--gpus N", "1"),
        "memory": ("GPU memory to promise on each GPU, such as 6GiB.", "--memory SIZE", "estimated"),
        "cores": ("Processor cores to promise.", "--cores N", _DAEMON),
        "host_memory": ("Host memory to promise, also its limit, such as 32GiB.", "--host-memory SIZE", _DAEMON),
        "exclusive": ("Reserve whole GPUs for the job, or share them.", "--exclusive/--shared", "shared"),
        "min_speed": (
            "Share a GPU only at this share of full speed, such as 0.8.",
            "--min-speed SHARE",
            _DAEMON,
        ),
        "model": ("Estimate this model instead of the script, such as torchvision:resnet50.", "--model SOURCE"),
        "batch_size": ("With --model: samples in a batch.", "--batch-size -b N"),
        "estimator": ("Estimator, such as ullage, horus or none.", "--estimator -e NAME", "the daemon's"),
    },
    SCHEDULE: {
        "array": (_ARRAY, "--array INDICES"),
        "throttle": ("Maximum number of array jobs that run at once.", "--throttle N"),
        "after": (_AFTER, "--after JOB"),
        "begin": (f"Earliest start: {START_FORMS}.", "--begin TIME"),
        "priority": ("Jobs with a higher priority start first.", "--priority N", "0"),
        "hold": ("Do not start before 'ullage edit --release'.", "--hold"),
        "time_limit": ("Stop the job after this long, such as 90m or 12h.", "--time-limit -t TIME"),
    },
    RUN: {
        "retries": ("Maximum number of retries if the job fails.", "--retries N", "0"),
        "requeue": ("Allow another start after a failure, or start once only.", "--requeue/--no-requeue", "requeue"),
        "cwd": ("Run in this folder.", "--cwd -C FOLDER", "this folder, or the job file's"),
        "venv": ("Run in this virtual environment.", "--venv FOLDER"),
        "conda": ("Run in this conda environment.", "--conda NAME"),
        "output": (_OUTPUT, "--output -o FILE"),
        "error": ("Write standard error to this file.", "--error FILE", "the file of --output"),
        "resumable": ("The job saves a checkpoint on SIGUSR1 and can resume.", "--resumable"),
        "mps_threads": ("With MPS: percentage of the GPU's threads.", "--mps-threads PERCENT"),
        "mps_memory": ("With MPS: limit of the job's GPU memory.", "--mps-memory SIZE"),
        "on_end": ("Command to run when the job ends, with the result as JSON on its input.", "--on-end COMMAND"),
    },
}
_COMPLETERS = {"model": completion.sources, "estimator": completion.estimators, "after": completion.jobs}


def job_options(editable: Container[str] | None = None) -> Options:
    """Return all options of a job; or those for editable fields, without defaults and groups."""
    found: Options = {}
    editing = editable is not None
    for panel, options in _OPTIONS.items():
        for name, (help, spelling, *default) in options.items():
            if editable is not None and name not in editable:
                continue
            made = option(
                help,
                spelling,
                panel=None if editing else panel,
                complete=_COMPLETERS.get(name),
                show_default=False if editing else (*default, False)[0],
            )
            kind: Any = list[str] if name == "after" else bool if spelling.split()[-1].startswith("-") else str
            found[name] = Annotated[kind | None, made], None
    return found


def given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != []}
