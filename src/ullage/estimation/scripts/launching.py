"""Launchers written in Python: one of the processes that they would start is followed in this one."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed

from ullage.jobs.ranks import Rank
from ullage.virtual.call.replacements import Replacements

_ALONE = "accelerate started one process, since nobody said how many: say --num_processes N"
Follow = Callable[[], None]


class Launching:
    """Runs a script, or a function of it, as a launcher would in each of its processes."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note
        self._follow: Follow | None = None

    def install(self, replacements: Replacements) -> None:
        """Follow one rank if `torch.distributed.launcher` would start all: torchrun, accelerate, notebooks."""
        if not torch.distributed.is_available():
            return
        from torch.distributed.launcher import api

        original = api.elastic_launch.__call__

        def call(launch: Any, *args: Any) -> Any:
            config, entry = launch._config, launch._entrypoint
            size = config.nproc_per_node * config.min_nodes
            rank = Rank(size, min(int(os.environ.get("RANK", 0)), size - 1), config.min_nodes)
            if callable(entry):
                with rank.entered():
                    return {rank.number: entry(*args)}
            if self._follow is None:
                return original(launch, *args)
            with rank.entered():
                self._follow()
            return {}

        replacements.put(api.elastic_launch, "__call__", call)

    def run(self, launcher: list[str], script: list[str], follow: Follow) -> None:
        """Run `accelerate launch` with a script's words after its own; `follow` runs the script here."""
        launch: Any = importlib.import_module("accelerate.commands.launch")

        def alone(args: Any) -> None:
            if args.num_processes == 1 and not {"--num_processes", "--num-processes"} & {
                word.partition("=")[0] for word in launcher
            }:
                self._note("launcher", _ALONE)
            os.environ.update(launch.prepare_simple_launcher_cmd_env(args)[1])
            follow()

        self._follow = follow
        launch.simple_launcher = alone
        sys.argv = [*launcher[1:], *script]
        launch.launch_command(launch.launch_command_parser().parse_args([*launcher[2:], *script]))
