"""A policy for SkyPilot that gives a task without an accelerator the smallest GPU that it fits on.

In `~/.sky/config.yaml`:

    admin_policy: ullage.adapters.skypilot.SmallestGPU

What a task runs is read from its `run` commands, with the files of its `workdir`; or the variable `ULLAGE_QUESTION` in
its `envs` says what to estimate, as JSON: `{"model": "timm:vit_small_patch16_224", "options": {"batch_size": 64}}`.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ullage.adapters.service import Ask, ask_daemon, is_remote, needs_of, smallest
from ullage.errors import InvalidValue

QUESTION, ACCELERATORS = "ULLAGE_QUESTION", "ULLAGE_SKYPILOT_GPUS"
# What SkyPilot calls a GPU, and which one that is.
NAMES = {
    "T4": "T4", "V100": "V100-16GB", "L4": "L4", "A10G": "A10G", "V100-32GB": "V100-32GB", "A100": "A100-40GB",
    "L40S": "L40S", "A100-80GB": "A100-80GB", "H100": "H100-80GB", "H200": "H200", "B200": "B200",
}  # fmt: skip


try:
    from sky import AdminPolicy
except ModuleNotFoundError:  # then nobody registers the policy
    AdminPolicy = object


class SmallestGPU(AdminPolicy):  # type: ignore[misc]
    """Fills in the accelerator. A task that names one, or runs no Python that is found, is left as it is."""

    ask: Ask = staticmethod(ask_daemon)

    @classmethod
    def validate_and_mutate(cls, user_request: Any) -> Any:
        """The request with an accelerator; refused (`InvalidValue`) if the task fits on none of them."""
        task = user_request.task
        if not any(resources.accelerators for resources in task.resources):
            question = question_of(task)
            if question is not None:
                task.set_resources_override({"accelerators": {cls._accelerator(question): 1}})
        from sky import MutatedUserRequest

        return MutatedUserRequest(task, user_request.skypilot_config)

    @classmethod
    def _accelerator(cls, question: dict[str, Any]) -> str:
        named = [name for name in os.environ.get(ACCELERATORS, "").split(",") if name]
        offered = {NAMES.get(name, name): name for name in named or NAMES}
        return offered[smallest(needs_of(cls.ask({**question, "gpu": list(offered)}))).gpu]


def question_of(task: Any) -> dict[str, Any] | None:
    """What is to be estimated for a task; `None` if nothing in it can be."""
    told = (task.envs or {}).get(QUESTION)
    if told is not None:
        try:
            return dict(json.loads(told))
        except (ValueError, TypeError):
            raise InvalidValue(f"{QUESTION}: needed a question as JSON; found {told[:80]!r}") from None
    if not isinstance(task.run, str) or not task.workdir or not os.path.isdir(task.workdir):
        return None
    from ullage.manager.slurm.batch_script import read_batch

    folder = os.path.abspath(task.workdir)
    trainings = read_batch(f"#!/bin/bash\n{task.run}", folder, {**os.environ, **(task.envs or {})}).trainings
    if not trainings:
        return None
    command = trainings[0].command
    if not is_remote():
        words = [command.program, *(["-m"] if command.module else []), command.source, *command.args]
        return {"command": words, "cwd": trainings[0].folder, "env": dict(trainings[0].environment)}
    if command.module:
        return None  # another machine does not have its files
    with open(os.path.join(trainings[0].folder, command.source)) as file:
        return {"script": file.read(), "args": list(command.args)}
