"""Jobs of submitit with as many shards of a GPU as they need.

    executor = submitit.AutoExecutor(folder="logs")
    job = ullage.adapters.submitit.submit(executor, train, 64, gpu="A100-40GB")

A function is run here on a virtual GPU; a `CommandFunction` is asked about at a daemon of Ullage, as a command.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from ullage.adapters.service import Ask, MemoryNeed, ask_daemon, needs_of
from ullage.errors import InvalidValue
from ullage.manager.slurm.comment import write_comment
from ullage.units import GIB, format_bytes


def submit(
    executor: Any, function: Callable[..., Any], *args: Any, gpu: str, shard: int = GIB, ask: Ask = ask_daemon,
    **more: Any,
) -> Any:  # fmt: skip
    """`executor.submit(function, *args, **more)`, with shards of that GPU for what it takes. Returns submitit's job.

    `shard` is how many bytes a shard of the cluster stands for. A function that does not fit is refused. With other
    executors than Slurm's only that is done. The shards stay set for later jobs of the executor until they change.
    """
    need = need_of(function, *args, gpu=gpu, ask=ask, **more)
    if not need.fits:
        raise InvalidValue(
            f"the job can never run: it takes up to {format_bytes(need.upper)}, and {need.gpu} has "
            f"{format_bytes(need.memory)}"
        )
    shards = -(-need.upper // shard)
    if _is_slurm(executor):
        values = {"upper": need.upper, "shards": shards, "gpu": need.gpu}
        wanted = {"gres": f"shard:{shards}", "comment": write_comment(values)}
        _set(executor, wanted)
    return executor.submit(function, *args, **more)


def need_of(function: Callable[..., Any], *args: Any, gpu: str, ask: Ask = ask_daemon, **more: Any) -> MemoryNeed:
    """What a function, or a command of submitit's (`CommandFunction`), takes on a GPU."""
    command = getattr(function, "command", None)
    if command is not None:
        words = [*map(str, command), *map(str, args), *(f"--{name}={value}" for name, value in more.items())]
        where = str(getattr(function, "cwd", None) or os.getcwd())
        env = {**os.environ, **(getattr(function, "env", None) or {})}
        return needs_of(ask({"command": words, "cwd": where, "env": env, "gpu": gpu}))[0]
    from ullage.estimation.asking import estimate

    found = estimate(functools.partial(function, *args, **more), gpu=gpu)
    return MemoryNeed(found.gpu, found.bound, found.fits and found.bound <= found.gpu_memory, found.gpu_memory)


def _is_slurm(executor: Any) -> bool:
    return "slurm" in (getattr(executor, "cluster", None) or type(executor).__name__.lower())


def _set(executor: Any, wanted: dict[str, str]) -> None:
    """Beside what was set before. An AutoExecutor has Slurm's parameters with a prefix."""
    inner = getattr(executor, "_executor", None)
    name = "additional_parameters" if inner is None else "slurm_additional_parameters"
    before = dict((inner or executor).parameters.get("additional_parameters") or {})
    executor.update_parameters(**{name: {**before, **wanted}})
