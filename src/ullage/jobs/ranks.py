"""The ranks of a job: the environment variables that a launcher sets for each."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from ullage.errors import InvalidValue, UnknownName
from ullage.virtual.distributed.rank import LOCAL_RANK, LOCAL_SIZE

TORCHRUN, MPI, SLURM = "torchrun", "mpirun", "srun"
LAUNCHERS = {TORCHRUN: TORCHRUN, "accelerate": TORCHRUN, "deepspeed": TORCHRUN, MPI: MPI, "mpiexec": MPI, SLURM: SLURM}
# Each launcher's variables for the rank, the number of ranks, the rank on its machine, the ranks of a machine, the
# machine, and the number of machines. MPI has the names of Open MPI and of MPICH's relatives.
_VARIABLES = {
    TORCHRUN: (
        "RANK ROLE_RANK",
        "WORLD_SIZE ROLE_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
    ),
    MPI: (
        "PMI_RANK PMIX_RANK OMPI_COMM_WORLD_RANK",
        "PMI_SIZE OMPI_COMM_WORLD_SIZE OMPI_UNIVERSE_SIZE",
        f"{LOCAL_RANK} OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_NODE_RANK MPI_LOCALRANKID",
        f"{LOCAL_SIZE} OMPI_COMM_WORLD_LOCAL_SIZE MPI_LOCALNRANKS",
        "",
        "",
    ),
    SLURM: (
        "PMI_RANK SLURM_PROCID",
        "PMI_SIZE SLURM_NTASKS SLURM_NPROCS",
        f"{LOCAL_RANK} SLURM_LOCALID",
        f"{LOCAL_SIZE} SLURM_NTASKS_PER_NODE SLURM_GPUS_ON_NODE",
        "SLURM_NODEID",
        "SLURM_NNODES SLURM_JOB_NUM_NODES",
    ),
}
_CONSTANTS = {
    TORCHRUN: {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
    },
    SLURM: {"SLURM_JOB_ID": "1", "SLURM_JOBID": "1", "SLURM_STEP_ID": "0"},
}
NOT_FOLLOWED = ("horovodrun", "jsrun", "aprun", "ibrun")


@dataclass(frozen=True)
class Rank:
    """One of `world_size` ranks on `nodes` machines, each with one GPU, and the program that started it."""

    world_size: int = 1
    number: int = 0
    nodes: int = 1
    launcher: str = TORCHRUN

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise InvalidValue(f"world size must be at least 1, got {self.world_size}")
        if not 0 <= self.number < self.world_size:
            raise InvalidValue(
                f"rank must be 0 to {self.world_size - 1} (world size {self.world_size}), got {self.number}"
            )
        if self.nodes < 1 or self.world_size % self.nodes:
            raise InvalidValue(f"nodes must divide {self.world_size} ranks evenly, got {self.nodes}")
        if self.launcher not in LAUNCHERS:
            raise UnknownName("launcher", self.launcher, list(LAUNCHERS))

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    @property
    def environment(self) -> dict[str, str]:
        node, local = divmod(self.number, self.ranks_per_node)
        names = _VARIABLES[LAUNCHERS[self.launcher]]
        values = (self.number, self.world_size, local, self.ranks_per_node, node, self.nodes)
        variables = {name: str(value) for words, value in zip(names, values, strict=True) for name in words.split()}
        return variables | _CONSTANTS.get(LAUNCHERS[self.launcher], {})

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Set this process's environment variables to those of the rank inside the `with` statement."""
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
