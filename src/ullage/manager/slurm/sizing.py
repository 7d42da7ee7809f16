"""Sizes a job's request from its upper bound: shards of a GPU, or whole GPUs. Refuses jobs that can never run."""

from collections.abc import Sequence
from dataclasses import dataclass

from ullage.errors import InvalidValue
from ullage.manager.slurm.batch_script import NO_HINTS, Hints
from ullage.manager.slurm.sbatch_options import GpuRequest
from ullage.manager.slurm.site import GpuKind, Site
from ullage.performance.result import Utilization
from ullage.performance.sharing import share_of
from ullage.units import format_bytes


@dataclass(frozen=True)
class GpuNeed:
    """A job's need on each GPU of one kind. If `upper` is unknown (`None`), `why` has the reason."""

    kind: GpuKind
    upper: int | None
    utilization: Utilization | None = None
    why: str = ""


@dataclass(frozen=True)
class Sizing:
    """A job's request to Slurm on each node, with its reason: shards of one GPU, perhaps all of them, or GPUs."""

    name: str  # "shard" or "gpu"
    count: int
    type: str | None
    why: str
    need: GpuNeed | None = None

    @property
    def gres(self) -> str:
        return ":".join([self.name, *([self.type] if self.type else []), str(self.count)])


def size(needs: Sequence[GpuNeed], request: GpuRequest, site: Site, ranks: int = 1, hints: Hints = NO_HINTS) -> Sizing:
    """Size a job's request by its needs on each kind of GPU; raise `InvalidValue` if it can never run. A job without a
    GPU option gets one GPU for each of its `ranks` on a node."""
    gpus = request.per_node or ranks
    unknown = next((need for need in needs if need.upper is None), None)
    if unknown is not None:
        return _whole(site, request, gpus, unknown.why)
    fitting = [need for need in needs if need.upper is not None and need.upper <= need.kind.gpu.usable]
    if not fitting:
        raise InvalidValue(_never(needs[-1]))
    largest = max(fitting, key=lambda need: need.upper or 0)
    pinned = request.type or (None if len(fitting) == len(needs) else largest.kind.type)
    if hints.exclusive:
        return _whole(site, request, gpus, "the job wants GPUs of its own", largest, pinned)
    if gpus > 1:
        return _whole(site, request, gpus, "Slurm cannot promise shards of several GPUs on one node", largest, pinned)
    shared = [need for need in fitting if need.kind.shards]
    if not shared:
        why = "the GPUs of this cluster have no shards ('ullage slurm configure' says how)"
        return _whole(site, request, gpus, why, largest, pinned)
    if hurt := _hurts(shared, site.sharing, hints.min_speed):
        return _whole(site, request, gpus, hurt, largest, pinned)
    taken = max(shared, key=lambda need: need.kind.shards_for(need.upper or 0))
    count = taken.kind.shards_for(taken.upper or 0)
    return Sizing("shard", count, pinned, f"{count} of a GPU's {taken.kind.shards} shards", taken)


def _whole(
    site: Site, request: GpuRequest, gpus: int, why: str, need: GpuNeed | None = None, kind: str | None = None
) -> Sizing:
    """Return a request for exclusive GPUs. A single one is requested as all of its shards, if all GPUs have the same
    number, since Slurm 22.05 allocates GPUs with used shards."""
    kind = kind or request.type
    shards = {each.shards for each in site.kinds if kind is None or each.type == kind}
    if gpus == 1 and len(shards) == 1 and (count := shards.pop()):
        return Sizing("shard", count, kind, f"all {count} shards of a GPU, since {why}", need)
    return Sizing("gpu", gpus, kind, why, need)


def _never(need: GpuNeed) -> str:
    gpu = need.kind.gpu
    return (
        f"the job can never run: it needs up to {format_bytes(need.upper)} on one GPU, and the largest that it can "
        f"get, {gpu.name}, has {format_bytes(gpu.usable)}. Make its batch smaller ('ullage max-batch' finds the "
        "largest that fits), name a partition with larger GPUs, or submit it as it is with '#ULLAGE no-estimate'"
    )


def _hurts(needs: Sequence[GpuNeed], how: str, min_speed: float | None) -> str | None:
    """Return why the job should not share a GPU, judged by two copies of it; `None` without a reason."""
    for need in needs:
        if need.utilization is None:
            continue
        sharing = share_of([need.utilization, need.utilization], need.kind.gpu, how)
        if sharing.throughput < 1:
            share = f"{sharing.throughput:.2f} times what they do one after the other"
            return f"two such jobs on one {sharing.gpu} do {share}"
        if min_speed is not None and sharing.slowest < min_speed:
            return f"next to another such job it would have {sharing.slowest:.0%} of its speed"
    return None
