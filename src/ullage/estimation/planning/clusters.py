"""The GPUs to plan for: their number, model and machines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ullage.errors import InvalidValue
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu

GPUS_OF_A_NODE = 8
_GPUS = re.compile(r"(?:(\d+)(?:\.\.(\d+))?\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?(.+)")


@dataclass(frozen=True)
class Cluster:
    """A number of GPUs on a number of machines."""

    gpus: int
    nodes: int = 1

    @property
    def ranks_per_node(self) -> int:
        return self.gpus // self.nodes


def read_gpus(text: str) -> tuple[GPU, list[Cluster]]:
    """GPUs to plan for: `"1..64xH100"` (powers of two, eight in a machine), `"8xA100-80GB"`, `"2x8xH100"` (machines,
    and GPUs in each), `"1..8x8xH100"`.

    >>> card, clusters = read_gpus("4..16xH100")
    >>> card.name, [(one.gpus, one.nodes) for one in clusters]
    ('H100-80GB', [(4, 1), (8, 1), (16, 2)])
    >>> read_gpus("2x4xL4")[1]
    [Cluster(gpus=8, nodes=2)]
    """
    found = _GPUS.fullmatch(text.strip())
    assert found is not None or not text.strip()
    if found is None or found[1] is not None and int(found[1]) < 1 or found[3] is not None and int(found[3]) < 1:
        raise InvalidValue(f"GPUs must be written as 1..64xH100, 8xA100-80GB or 2x8xH100, got {text!r}")
    first = int(found[1] or 1)
    last = int(found[2] or first)
    if last < first:
        raise InvalidValue(f"a range of GPUs must rise, such as 1..64xH100, got {text!r}")
    counts = [first]
    while found[2] is not None and counts[-1] < last:
        counts.append(min(last, 1 << counts[-1].bit_length()))
    card = find_gpu(found[4])
    if found[3] is not None:
        return card, [Cluster(count * int(found[3]), count) for count in counts]
    for count in counts:
        if count > GPUS_OF_A_NODE and count % GPUS_OF_A_NODE:
            raise InvalidValue(
                f"{count} GPUs are not whole machines of {GPUS_OF_A_NODE}; say how they are, such as 3x4x{found[4]}"
            )
    return card, [Cluster(count, max(1, count // GPUS_OF_A_NODE)) for count in counts]
