"""Which rank of how many a job runs as: the variables that its launcher would give to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from ullage.errors import InvalidValue, UnknownName
from ullage.virtual.distributed.rank import LOCAL_RANK, LOCAL_SIZE

TORCHRUN, MPI, SLURM = "torchrun", "mpirun", "srun"
LAUNCHERS = {TORCHRUN: TORCHRUN, "accelerate": TORCHRUN, "deepspeed": TORCHRUN, MPI: MPI, "mpiexec": MPI, SLURM: SLURM}
NOT_FOLLOWED = ("horovodrun", "jsrun", "aprun", "ibrun")


@dataclass(frozen=True)
class Rank:
    """One of `world_size` ranks on `nodes` machines, a GPU each, and the program that started it.

    >>> Rank(16, 9, nodes=2).environment["LOCAL_RANK"]
    '1'
    >>> Rank(16, 9, nodes=2, launcher="srun").environment["SLURM_LOCALID"]
    '1'
    """

    world_size: int = 1
    number: int = 0
    nodes: int = 1
    launcher: str = TORCHRUN

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise InvalidValue(f"world size: needed at least one rank; found {self.world_size}")
        if not 0 <= self.number < self.world_size:
            raise InvalidValue(
                f"rank: needed 0 to {self.world_size - 1}, since the world has {self.world_size}; found {self.number}"
            )
        if self.nodes < 1 or self.world_size % self.nodes:
            raise InvalidValue(
                f"nodes: needed a number that divides {self.world_size} ranks evenly; found {self.nodes}"
            )
        if self.launcher not in LAUNCHERS:
            raise UnknownName("launcher", self.launcher, list(LAUNCHERS))

    @property
    def ranks_per_node(self) -> int:
        """The ranks, and so the GPUs, of one machine."""
        return self.world_size // self.nodes

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the launcher sets."""
        node, local = divmod(self.number, self.ranks_per_node)
        on_node, kind = self.ranks_per_node, LAUNCHERS[self.launcher]
        found: dict[str, int | str]
        if kind == TORCHRUN:
            found = {
                "RANK": self.number, "LOCAL_RANK": local, "GROUP_RANK": node, "ROLE_RANK": self.number,
                "WORLD_SIZE": self.world_size, "LOCAL_WORLD_SIZE": on_node, "GROUP_WORLD_SIZE": self.nodes,
                "ROLE_WORLD_SIZE": self.world_size, "MASTER_PORT": 29500, "TORCHELASTIC_RESTART_COUNT": 0,
                "MASTER_ADDR": "127.0.0.1", "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "none",
            }  # fmt: skip
            return {name: str(value) for name, value in found.items()}
        found = {"PMI_RANK": self.number, "PMI_SIZE": self.world_size, LOCAL_RANK: local, LOCAL_SIZE: on_node}
        if kind == MPI:  # Open MPI, and what comes from MPICH
            found |= {
                "OMPI_COMM_WORLD_RANK": self.number, "OMPI_COMM_WORLD_SIZE": self.world_size,
                "OMPI_COMM_WORLD_LOCAL_RANK": local, "OMPI_COMM_WORLD_LOCAL_SIZE": on_node,
                "OMPI_COMM_WORLD_NODE_RANK": local, "OMPI_UNIVERSE_SIZE": self.world_size, "PMIX_RANK": self.number,
                "MPI_LOCALRANKID": local, "MPI_LOCALNRANKS": on_node,
            }  # fmt: skip
        else:
            found |= {
                "SLURM_PROCID": self.number, "SLURM_LOCALID": local, "SLURM_NODEID": node,
                "SLURM_NTASKS": self.world_size, "SLURM_NPROCS": self.world_size, "SLURM_NNODES": self.nodes,
                "SLURM_JOB_NUM_NODES": self.nodes, "SLURM_NTASKS_PER_NODE": on_node, "SLURM_GPUS_ON_NODE": on_node,
                "SLURM_JOB_ID": 1, "SLURM_JOBID": 1, "SLURM_STEP_ID": 0,
            }  # fmt: skip
        return {name: str(value) for name, value in found.items()}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The variables of this process are those of the rank, inside the `with` statement."""
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
