"""Networks between GPUs by name: their speed inside a machine and between machines, and the network of each GPU.

Bandwidths are NCCL's own (src/graph/topo.h of NCCL 2.29: per link by compute capability, 12 GB/s for PCIe 3.0 x16, 12
GB/s for 100 Gbit/s), not those of data sheets. Latencies are those of a step of its rings and trees, and of a
collective itself (src/graph/tuning.cc).
"""

import re
from dataclasses import dataclass

from ullage.errors import InvalidValue, UnknownName
from ullage.hardware.specification import GPU

NVLINK, PCIE, FABRIC = "NVLink", "PCIe", "network"
_REACHED = 0.96  # of a network's nominal rate: 12 GB/s for 100 Gbit/s


@dataclass(frozen=True)
class Network:
    """A network by name. `bandwidth` is in GB/s, in one direction: of a GPU inside a machine, of an adapter between
    machines. `kind` is NVLink, PCIe, or a network between machines; `per_gpu` says that it has an adapter for each GPU.

    >>> NETWORKS["nvlink3"].bandwidth, NETWORKS["ib-hdr"].bandwidth
    (240.0, 24.0)
    """

    name: str
    kind: str
    bandwidth: float
    meaning: str
    per_gpu: bool = False


def _nvlink(generation: int, links: int, each: float, cards: str) -> Network:
    return Network(f"nvlink{generation}", NVLINK, links * each, f"NVLink of {cards}: {links} links")


def _infiniband(name: str, gigabits: int) -> Network:
    words = f"InfiniBand {name.upper()}, {gigabits} Gbit/s, an adapter for each GPU"
    return Network(f"ib-{name}", FABRIC, gigabits / 8 * _REACHED, words, per_gpu=True)


def _ethernet(gigabits: int) -> Network:
    words = f"Ethernet, {gigabits} Gbit/s, an adapter for each machine"
    return Network(f"eth-{gigabits}", FABRIC, gigabits / 8 * _REACHED, words)


NETWORKS = {
    network.name: network
    for network in (
        _nvlink(1, 4, 18.0, "P100"),
        _nvlink(2, 6, 20.0, "V100"),
        _nvlink(3, 12, 20.0, "A100"),
        _nvlink(4, 18, 20.6, "H100 and H200"),
        _nvlink(5, 18, 40.1, "B200"),
        Network("pcie3", PCIE, 12.0, "PCIe 3.0 x16"),
        Network("pcie4", PCIE, 24.0, "PCIe 4.0 x16"),
        Network("pcie5", PCIE, 48.0, "PCIe 5.0 x16"),
        _infiniband("edr", 100),
        _infiniband("hdr", 200),
        _infiniband("ndr", 400),
        _infiniband("xdr", 800),
        *map(_ethernet, (10, 25, 100, 200, 400)),
    )
}

# Networks of machines as sold: NVIDIA's DGX and HGX systems of each generation; cards that plug in have PCIe.
_SOCKETED = re.compile(r"SXM|HBM3|H200$|H20$|B200|B300|GH200|GB200")
_OF_SOCKETS = {
    "pascal": "nvlink1",
    "volta": "nvlink2",
    "ampere": "nvlink3",
    "hopper": "nvlink4",
    "blackwell": "nvlink5",
}
_OF_SLOTS = {"pascal": "pcie3", "volta": "pcie3", "turing": "pcie3", "hopper": "pcie5", "blackwell": "pcie5"}
_BETWEEN = {"nvlink1": "ib-edr", "nvlink2": "ib-edr", "nvlink3": "ib-hdr", "nvlink4": "ib-ndr", "nvlink5": "ib-ndr"}


@dataclass(frozen=True)
class Interconnect:
    """The connections between the GPUs of a job: one network inside a machine, and another between machines, each with
    this number of `adapters`; `None` means as many as the network usually has.

    >>> str(Interconnect(NETWORKS["nvlink4"], NETWORKS["ib-ndr"], 4))
    'nvlink4,4xib-ndr'
    """

    inside: Network
    between: Network
    adapters: int | None = None

    def __str__(self) -> str:
        times = "" if self.adapters is None else f"{self.adapters}x"
        return f"{self.inside.name},{times}{self.between.name}"


def interconnect_of(gpu: GPU, named: str | None = None) -> Interconnect:
    """Return the connections between GPUs like this one: the networks in `named` (`"nvlink4"`, `"pcie4,eth-100"`,
    `"4xib-ndr"`), otherwise as in machines sold with them."""
    generation = gpu.generation or "ampere"
    socketed = _SOCKETED.search(gpu.device_name) is not None and not gpu.is_mig
    inside = NETWORKS[(_OF_SOCKETS if socketed else _OF_SLOTS).get(generation, "pcie4")]
    between, adapters = None, None
    for word in filter(None, (part.strip() for part in (named or "").split(","))):
        count, network = _read(word)
        if network.kind == FABRIC:
            between, adapters = network, count
        elif count is not None:
            raise InvalidValue(
                f"interconnect: only a network between machines can have a number of adapters, got {word!r}"
            )
        else:
            inside = network
    return Interconnect(inside, between or NETWORKS[_BETWEEN.get(inside.name, "eth-100")], adapters)


def check_interconnect(named: str) -> str:
    """Return the same text if it names known networks."""
    words = [part.strip() for part in named.split(",") if part.strip()]
    kinds = [_read(word)[1].kind == FABRIC for word in words]
    if not words or len(words) > 2 or len(set(kinds)) < len(kinds):
        raise InvalidValue(
            "interconnect must be a network inside a machine, one between machines, or both, such as "
            f"'nvlink4,ib-ndr', got {named!r}"
        )
    return named


def _read(word: str) -> tuple[int | None, Network]:
    times = re.fullmatch(r"(?:([0-9]+)[x×*])?(.+)", word.casefold())
    assert times is not None
    name = times[2].strip()
    if name not in NETWORKS:
        raise UnknownName("network", name, NETWORKS, hint="one of " + ", ".join(NETWORKS))
    if times[1] is not None and int(times[1]) < 1:
        raise InvalidValue(f"interconnect: number of adapters must be at least 1, got {word!r}")
    return (None if times[1] is None else int(times[1])), NETWORKS[name]
