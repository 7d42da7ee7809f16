"""Writes the lines of slurm.conf and gres.conf, and the files, with which a site lets jobs share GPUs by memory."""

import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ullage.errors import InvalidValue
from ullage.hardware import GPU, gpu_list, local_gpus
from ullage.manager.slurm.site import HOWS, SITE_FILE
from ullage.units import GIB

_MPS_FOLDER = "/run/ullage-mps"
_CONTROL = "nvidia-cuda-mps-control"
_SCRIPTS = {"Prolog": "mps_prolog.sh", "Epilog": "mps_epilog.sh", "TaskProlog": "mps_task_prolog.sh"}
UNIT = "ullage-slurm-watch.service"
LUA = {"JobSubmitPlugins": "job_submit.lua", "CliFilterPlugins": "cli_filter.lua"}


@dataclass(frozen=True)
class NodeGroup:
    """Nodes with the same GPUs."""

    nodes: str
    count: int
    gpu: GPU

    @property
    def type(self) -> str:
        return self.gpu.name.lower()

    @property
    def shards_per_gpu(self) -> int:
        """Return the number of shards of a GPU: one for each GiB that programs can use."""
        return self.gpu.usable // GIB

    @property
    def shards(self) -> int:
        return self.count * self.shards_per_gpu


def node_group(text: str) -> NodeGroup:
    """Parse nodes and their GPUs as a user writes them.

    >>> group = node_group("n[1-3]=4xA100-40GB")
    >>> group.nodes, group.count, group.type, group.shards
    ('n[1-3]', 4, 'a100-40gb', 156)
    """
    nodes, equals, cards = text.partition("=")
    if not equals or not re.fullmatch(r"[\w.\[\],-]+", nodes):
        raise InvalidValue(f"nodes must be given with their GPUs, such as 'n[1-3]=4xA100-40GB', got {text!r}")
    cards_of_node = gpu_list(cards)
    if len(set(cards_of_node)) != 1:
        raise InvalidValue(f"the GPUs of a node must be of one kind, such as 4xA100-40GB, got {cards!r}")
    return NodeGroup(nodes, len(cards_of_node), cards_of_node[0])


def this_node() -> NodeGroup:
    """Return this machine with the GPUs that NVML finds."""
    cards = local_gpus()
    if not cards:
        raise InvalidValue(
            "nodes must be given with their GPUs, such as 'n[1-3]=4xA100-40GB', got none in the command, and no GPU on "
            "this machine"
        )
    return NodeGroup(socket.gethostname().partition(".")[0], len(cards), cards[0])


def slurm_conf(groups: Sequence[NodeGroup], sharing: str, folder: str) -> str:
    """Return lines for slurm.conf. They describe only the GPUs of nodes; the site adds the rest."""
    lines = [
        "GresTypes=gpu,shard",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "JobSubmitPlugins=lua",
        "CliFilterPlugins=lua",
    ]
    if sharing == "mps":
        lines += [f"{name}={folder}/{script}" for name, script in _SCRIPTS.items()]
    lines += [
        "# Slurm before 23.11.5 gives GPUs of which jobs have shards to jobs that ask for GPUs: for jobs of several",
        "# GPUs, keep nodes without shards, in a partition of their own.",
        "# Add these to the lines of the nodes that you have:",
    ]
    lines += [f"NodeName={each.nodes} Gres=gpu:{each.type}:{each.count},shard:{each.shards}" for each in groups]
    return "\n".join(lines) + "\n"


def gres_conf(groups: Sequence[NodeGroup]) -> str:
    lines = []
    for each in groups:
        files = "/dev/nvidia0" if each.count == 1 else f"/dev/nvidia[0-{each.count - 1}]"
        lines += [
            f"NodeName={each.nodes} Name=gpu Type={each.type} File={files}",
            f"NodeName={each.nodes} Name=shard Count={each.shards}",
        ]
    return "\n".join(lines) + "\n"


def site_toml(groups: Sequence[NodeGroup], sharing: str) -> str:
    """Return the file that names the GPU model of each of Slurm's types."""
    lines = [f'sharing = "{sharing}"', "", "[gpus]"]
    lines += dict.fromkeys(f'"{each.type}" = "{each.gpu.name}"' for each in groups)
    return "\n".join(lines) + "\n"


def files(
    groups: Sequence[NodeGroup], sharing: str = "time-slicing", folder: str = "/etc/slurm", systemd: str | None = None
) -> dict[str, str]:
    """Return all files of a site by name. `slurm.conf.ullage` and `gres.conf.ullage` have lines for the site's own
    files. With `systemd`, a folder that all nodes share, they include a unit for the watcher."""
    if sharing not in HOWS:
        raise InvalidValue(f"--sharing must be {' or '.join(HOWS)}, got {sharing!r}")
    if systemd is not None and not re.fullmatch(r"/[^\s\"'\\$]*", systemd):
        raise InvalidValue(f"--systemd must be the path of a folder that all nodes share, got {systemd!r}")
    by_type = {each.type: each.shards_per_gpu for each in groups}
    most = {"": max(by_type.values()), **by_type}
    largest = max((each.gpu for each in groups), key=lambda card: card.usable)
    beside = Path(sys.executable).parent / "ullage"
    values = {
        "ULLAGE": str(beside) if beside.exists() else f"{sys.executable} -m ullage",  # a path that works for all users
        "SHARDS": "{" + ", ".join(f'["{name}"] = {count}' for name, count in most.items()) + "}",
        "GPUS": str(max(each.count for each in groups)),
        "MEMORY": str(largest.usable),
        "CONTROL": shutil.which(_CONTROL) or f"/usr/bin/{_CONTROL}",
        "FOLDER": _MPS_FOLDER,
        "SHARD_MIB": "1024",
        "SHARED": (systemd or "").replace("%", "%%"),
    }
    contents = {
        "slurm.conf.ullage": slurm_conf(groups, sharing, folder),
        "gres.conf.ullage": gres_conf(groups),
        SITE_FILE: site_toml(groups, sharing),
    }
    scripts = _SCRIPTS.values() if sharing == "mps" else ()
    unit = [UNIT] if systemd else []
    return contents | {name: _filled(name, values) for name in (*LUA.values(), *scripts, *unit)}


def _filled(name: str, values: Mapping[str, str]) -> str:
    text = (resources.files("ullage.manager.slurm") / "files" / name).read_text()
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], text)


def write_files(contents: Mapping[str, str], folder: Path) -> list[Path]:
    """Write files into a folder. If one of them exists, write none."""
    there = [name for name in contents if (folder / name).exists()]
    if there:
        raise InvalidValue(f"{folder} already has {', '.join(there)}; nothing was written. Name an empty folder")
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            with open(folder / name, "x") as file:
                file.write(text)
            if name.endswith(".sh"):
                os.chmod(folder / name, 0o755)
            written.append(folder / name)
    except OSError as error:
        raise InvalidValue(f"cannot write to {folder}: {error.strerror}") from None
    return written
