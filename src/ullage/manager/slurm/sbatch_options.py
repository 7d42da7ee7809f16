"""Reads the options of a job, from its batch script and sbatch's command line, and the GPUs that it requests."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ullage.errors import InvalidValue
from ullage.estimation.jobs.slurm_words import read_words, tasks_and_nodes
from ullage.manager.slurm.commands import parse_gres

GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")


def with_options(words: Sequence[str], added: Sequence[str]) -> list[str]:
    """Return a command line of sbatch with more options, which override those that it has.

    >>> with_options(["--gpus=1", "job.sh", "--lr", "1"], ["--gpus=0"])
    ['--gpus=1', '--gpus=0', 'job.sh', '--lr', '1']
    """
    rest = read_words(words).rest
    head = list(words[: len(words) - len(rest)])
    end = ["--"] if head[-1:] == ["--"] else []
    return [*head[: len(head) - len(end)], *added, *end, *rest]


def read_directives(text: str) -> dict[str, str]:
    """Return the options in the `#SBATCH` lines of a batch script, which sbatch reads up to the first command.

    >>> read_directives("#!/bin/bash\\n#SBATCH -n 2 --gres=gpu:1  # one\\n\\necho\\n#SBATCH -n 3")
    {'ntasks': '2', 'gres': 'gpu:1'}
    """
    options: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#SBATCH"):
            try:
                options |= read_words(shlex.split(line.removeprefix("#SBATCH"), comments=True)).values
            except (ValueError, InvalidValue) as error:
                raise InvalidValue(f"line {number}: '{line.strip()}' cannot be read: {error}") from None
        elif line.strip() and not line.startswith("#"):
            break
    return options


@dataclass(frozen=True)
class GpuRequest:
    """The GPUs that a job requests on each of its nodes, their type, and the number of nodes; or its own shards."""

    per_node: int | None = None
    type: str | None = None
    nodes: int = 1
    shards: int | None = None
    options: tuple[str, ...] = ()  # the options of sbatch that request them


def gpu_request(values: Mapping[str, str]) -> GpuRequest:
    """Return the GPUs that the options of a job request; `per_node` is `None` if they request none.

    >>> gpu_request({"gpus": "a100:4", "nodes": "2"})
    GpuRequest(per_node=2, type='a100', nodes=2, shards=None, options=('gpus',))
    >>> gpu_request({"gres": "gpu:1"}).per_node, gpu_request({"gres": "shard:12"}).shards
    (1, 12)
    """
    tasks, nodes = tasks_and_nodes(values)
    on_node = -(-tasks // nodes)
    gres = parse_gres(values.get("gres", ""))
    shards = next((each.count for each in gres if each.name == "shard"), None)
    per_node = sum(each.count for each in gres if each.name == "gpu") or None
    kinds = [each.type for each in gres if each.name in ("gpu", "shard") and each.type]
    factors = {"gpus": 1 / nodes, "gpus-per-node": 1.0, "gpus-per-task": float(on_node), "gpus-per-socket": 1.0}
    given = tuple(name for name in GPU_OPTIONS if values.get(name) not in (None, "", "0"))
    for name in given:
        listed = parse_gres(",".join(f"gpu:{part}" for part in values[name].split(",")))  # 2, a100:2, or several
        kinds += [each.type for each in listed if each.type]
        per_node = max(per_node or 0, -int(-sum(each.count for each in listed) * factors[name] // 1))
    if not gres and not given:
        return GpuRequest(nodes=nodes)
    return GpuRequest(per_node, kinds[0] if kinds else None, nodes, shards, given)
