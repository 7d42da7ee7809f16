"""The GPUs of a cluster: their names in Slurm, their models, and the size of a shard of each."""

import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ullage.errors import InvalidValue, SlurmFailed, UnknownName
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.manager.slurm import commands
from ullage.manager.slurm.commands import SlurmNode
from ullage.units import GIB

SITE_FILE = "ullage.toml"  # next to slurm.conf
HOWS = ("mps", "time-slicing")
_COUNTS_GPUS = (23, 11, 5)  # its notes: "Fix issue where you could have a gpu allocated as well as a shard on that gpu"


@dataclass(frozen=True)
class GpuKind:
    """GPUs of one type: Slurm's name for it, the model, the shards of each GPU, and the most GPUs of a node."""

    type: str | None
    gpu: GPU
    shards: int
    per_node: int

    @property
    def shard(self) -> float:
        """Return the bytes of a shard; all shards of a GPU make up all of its memory."""
        return self.gpu.usable / self.shards if self.shards else float(self.gpu.usable)

    def shards_for(self, memory: int) -> int:
        """Return the fewest shards that hold `memory` bytes."""
        return max(1, -int(-memory // self.shard))


@dataclass(frozen=True)
class Site:
    """A cluster: its kinds of GPUs, the way jobs share one, and the release of its Slurm."""

    kinds: tuple[GpuKind, ...]
    sharing: str = "time-slicing"
    release: tuple[int, ...] = ()

    @property
    def gives_gpus_twice(self) -> bool:
        """Whether a job that requests GPUs may get some on which other jobs have shards."""
        return gives_gpus_twice(self.release) and any(kind.shards for kind in self.kinds)


@dataclass(frozen=True)
class SiteFile:
    """The content of `ullage.toml` next to slurm.conf: GPUs by Slurm's types, and the way jobs share one."""

    gpus: dict[str, str]
    sharing: str = "time-slicing"


def read_site_file() -> SiteFile:
    """Read `ullage.toml`; return an empty `SiteFile` if there is none."""
    conf = os.environ.get("SLURM_CONF") or commands.configuration().get("SLURM_CONF", "/etc/slurm/slurm.conf")
    path = Path(conf).parent / SITE_FILE
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return SiteFile({})
    except (OSError, ValueError) as error:
        raise InvalidValue(f"{path} cannot be read: {error}") from None
    gpus, sharing = values.pop("gpus", {}), values.pop("sharing", "time-slicing")
    if values or not isinstance(gpus, dict) or not all(isinstance(name, str) for name in gpus.values()):
        raise InvalidValue(f'{path} must have [gpus] with lines such as a100 = "A100-40GB", and sharing')
    if sharing not in HOWS:
        raise InvalidValue(f"{path}: sharing must be {' or '.join(HOWS)}, got {sharing!r}")
    return SiteFile({name.casefold(): str(gpu) for name, gpu in gpus.items()}, sharing)


def gives_gpus_twice(release: tuple[int, ...]) -> bool:
    """Whether a release of Slurm treats a GPU as free when one of several jobs with shards on it has ended.

    >>> gives_gpus_twice((22, 5, 8)), gives_gpus_twice((23, 11, 5)), gives_gpus_twice(())
    (True, False, False)
    """
    return () < release < _COUNTS_GPUS


def read_site(partition: str | None = None, gpu_type: str | None = None, gpu: str | None = None) -> Site:
    """Return the GPUs of a partition (by default the cluster's default one), perhaps of one type. With `gpu`, only GPUs
    of that model count, and unknown types are assumed to be that model."""
    wanted = partition or commands.default_partition()
    names = wanted.split(",") if wanted else None
    nodes = [node for node in commands.nodes() if node.gpus]
    of_partition = [node for node in nodes if names is None or set(names) & set(node.partitions)]
    if not of_partition:
        where = f"the partition {wanted}" if names and nodes else "this cluster"
        raise SlurmFailed(f"{where} has no nodes with GPUs (sinfo --Format=nodelist,gres shows them)")
    own = read_site_file()
    kinds = _kinds(of_partition, gpu_type, find_gpu(gpu) if gpu else None, own)
    if not kinds:
        types = ", ".join(sorted({node.gpu_type or "without a type" for node in of_partition}))
        raise InvalidValue(f"there is no GPU {gpu or gpu_type}; there are GPUs of these types: {types}")
    return Site(tuple(kinds), own.sharing, commands.version())


def _kinds(nodes: Sequence[SlurmNode], wanted: str | None, gpu: GPU | None, own: SiteFile) -> list[GpuKind]:
    groups: dict[tuple[str | None, int], list[SlurmNode]] = {}
    for node in nodes:
        if wanted is None or (node.gpu_type or "").casefold() == wanted.casefold():
            groups.setdefault((node.gpu_type, node.shards_per_gpu), []).append(node)
    kinds = []
    for (name, shards), of_kind in groups.items():
        card = _named(name, shards, own, gpu)
        if gpu is None or card.name == gpu.name:
            kinds.append(GpuKind(name, card, shards, max(node.gpus for node in of_kind)))
    return sorted(kinds, key=lambda kind: kind.gpu.usable)


def _named(name: str | None, shards: int, own: SiteFile, taken: GPU | None) -> GPU:
    """Return the GPU model of one of Slurm's types. If several match, choose the one with a GiB for each shard."""
    try:
        if name is None:
            raise UnknownName("GPU", "", [])
        return find_gpu(own.gpus.get(name.casefold(), name))
    except UnknownName as error:
        alike = [find_gpu(each) for each in error.near]
        as_large = [card for card in alike if abs(card.usable / GIB - shards) < 2]
        if len(as_large) == 1:
            return as_large[0]
        if taken is not None:
            return taken
        called = "GPUs without a type" if name is None else f"GPUs of the type {name!r}"
        raise InvalidValue(
            f"cannot tell which model Slurm's {called} are; name it with '#ULLAGE gpu=NAME' or --gpu NAME, "
            f"or for all users in {SITE_FILE} next to slurm.conf, which 'ullage slurm configure' writes"
        ) from None
