"""Which rank of how many a job runs as: the variables that torchrun would give to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from ullage.errors import InvalidValue


@dataclass(frozen=True)
class Rank:
    """One of `world_size` ranks on `nodes` machines, a GPU each.

    >>> Rank(16, 9, nodes=2).environment["LOCAL_RANK"]
    '1'
    """

    world_size: int = 1
    number: int = 0
    nodes: int = 1

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

    @property
    def ranks_per_node(self) -> int:
        """The ranks, and so the GPUs, of one machine."""
        return self.world_size // self.nodes

    @property
    def environment(self) -> dict[str, str]:
        """The variables that torchrun sets."""
        node, local = divmod(self.number, self.ranks_per_node)
        numbers = {
            "RANK": self.number, "LOCAL_RANK": local, "GROUP_RANK": node, "ROLE_RANK": self.number,
            "WORLD_SIZE": self.world_size, "LOCAL_WORLD_SIZE": self.ranks_per_node, "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_WORLD_SIZE": self.world_size, "MASTER_PORT": 29500, "TORCHELASTIC_RESTART_COUNT": 0,
        }  # fmt: skip
        words = {"MASTER_ADDR": "127.0.0.1", "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "none"}
        return {name: str(value) for name, value in numbers.items()} | words

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
