"""What `cli_filter.lua` asks in the process of a user who types `sbatch`: which options the job should have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ullage.manager.slurm.batch_script import read_file, read_hints
from ullage.manager.slurm.sbatch_options import gpu_request
from ullage.manager.slurm.submission import plan_in_words, plan_job


def answers(told: Mapping[str, Any], text: str = "") -> Iterator[tuple[str, str]]:
    """Options to set, by name, and words to `say`. A job that asks for no GPU and has no `#ULLAGE` line is left alone.

    `told` is what sbatch made of its command line and of the script's `#SBATCH` lines; `argv` are the script and its
    arguments. `text` is the script where sbatch had it on its standard input, as far as it can be read again.
    """
    options = {name: str(value) for name, value in told.items() if name != "argv"}
    words = [str(word) for word in told.get("argv", [])]
    if "wrap" in options:
        text = f"#!/bin/sh\n{options['wrap']}\n"
    elif words:
        text = read_file(words[0])
    elif not text.startswith("#!"):
        return  # it came through a pipe, say, which sbatch has read already
    arguments = words[1:]
    asks_for_gpus = gpu_request(options).per_node is not None
    if not asks_for_gpus and "#ULLAGE" not in text:
        return
    read_hints(text)
    plan = plan_job(text, options, arguments)
    yield from plan.options.items()
    if plan.sizing is not None or plan.notes:
        for line in plan_in_words(plan):
            yield "say", line
