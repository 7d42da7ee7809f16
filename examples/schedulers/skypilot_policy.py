"""A SkyPilot policy that gives a task without an accelerator the smallest GPU on which it fits.

Copy this file next to `~/.sky/config.yaml`, put its folder on PYTHONPATH, and write there:

    admin_policy: skypilot_policy.SmallestGPU

The variable `ULLAGE_QUESTION` in a task's `envs` says what to estimate, as JSON for `POST /v1/estimates`. The policy
asks the daemon that `ULLAGE_URL` and `ULLAGE_TOKEN` name, or the daemon of this machine.
"""

from __future__ import annotations

import json
import os
from typing import Any

import sky

from ullage.manager import Client

GPUS = {"T4": "T4", "L4": "L4", "A10G": "A10G", "L40S": "L40S", "A100": "A100-40GB", "A100-80GB": "A100-80GB"}
GPUS |= {"H100": "H100-80GB", "H200": "H200", "B200": "B200"}  # by SkyPilot's names, from the smallest


class SmallestGPU(sky.AdminPolicy):  # type: ignore[misc]
    """Fills in the accelerator of a task that names none and has a question."""

    @classmethod
    def validate_and_mutate(cls, user_request: Any) -> Any:
        """Return the request with an accelerator; raise `ValueError` if the task fits on no GPU."""
        task = user_request.task
        question = (task.envs or {}).get("ULLAGE_QUESTION")
        if question is not None and not any(resources.accelerators for resources in task.resources):
            task.set_resources_override({"accelerators": {cls.smallest(json.loads(question)): 1}})
        return sky.MutatedUserRequest(task, user_request.skypilot_config)

    @classmethod
    def smallest(cls, question: dict[str, Any]) -> str:
        """Return SkyPilot's name of the first GPU in `GPUS` on which the job fits."""
        url, token = os.environ.get("ULLAGE_URL"), os.environ.get("ULLAGE_TOKEN")
        with Client(url=url, token=token) as daemon:
            answer = daemon.estimate(details=False, gpu=list(GPUS.values()), **question)
        if answer["state"] != "done":
            raise ValueError(f"Ullage has no estimate: {answer['reason']}")
        fitting = {each["gpu"] for each in answer["estimates"] if each["fits"]}
        for name, gpu in GPUS.items():
            if gpu in fitting:
                return name
        raise ValueError(f"the task fits on none of {', '.join(GPUS)}")
