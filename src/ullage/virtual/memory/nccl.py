"""Memory of NCCL outside PyTorch's allocator, for a communicator of any size.

A communicator of one rank was measured on an H200 (NCCL 2.28): 64 channels of 6 MiB and 4 to 6 MiB more, or 8 MiB each
without CUDA's virtual memory. The 6 MiB are three small arrays (src/channel.cc) of 2 MiB each, CUDA's mapping unit.

Connections between ranks follow the sizes in NCCL's source and were not measured. Each channel of a ring has a buffer
for each protocol on the receiving side (src/init.cc, `computeBuffSizes`; src/transport/p2p.cc), and 2 MiB on the
sending side, or as many buffers if it sends to another machine (src/transport/net.cc). With NVLink multicast, since
Hopper, NVLS has 2 MiB for each of its channels and GPUs (src/transport/nvls.cc). Ranks that send to single others have
a connection to each of these, in several channels. Trees are connected when a small sum first needs them: see `more`.

The numbers of channels are those that NCCL prints on machines with eight equal GPUs. On four A100 with NVLink a user
measured 544 MiB for two ranks and 688 for four (https://github.com/NVIDIA/nccl/issues/964): between `size` and `size +
more`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ullage.hardware import GPU
from ullage.performance.networks import NVLINK, interconnect_of
from ullage.units import KIB, MIB

_ALONE, _CHANNEL, _CHANNEL_BY_CUDA_MALLOC = 6 * MIB, 6 * MIB, 8 * MIB
_MOST_CHANNELS = 64
_CHANNELS = {"nvlink1": 8, "nvlink2": 12, "nvlink3": 24, "nvlink4": 24, "nvlink5": 32}  # with PCIe there are 4
_CHANNELS_OF_PCIE, _CHANNELS_BETWEEN_MACHINES, _CHANNELS_TO_A_PEER_BETWEEN_MACHINES = 4, 16, 2
_BUFFERS = {"NCCL_LL_BUFFSIZE": 512 * KIB, "NCCL_LL128_BUFFSIZE": 4800 * KIB, "NCCL_BUFFSIZE": 4 * MIB}
_MAPPED = 2 * MIB  # at once
_MULTICAST_SINCE, _MULTICAST_CHANNELS = (9, 0), {9: 16, 10: 24}
_MULTICAST_BUFFERS = 2 * MIB  # of a channel: one to gather and one to scatter, of 8 chunks of 128 KiB


@dataclass(frozen=True)
class Communicator:
    """A communicator of this number of `ranks` and machines; `environment` has the variables of the process.

    >>> from ullage.hardware import gpu
    >>> Communicator(gpu("H200")).size // MIB, Communicator(gpu("H200"), {"NCCL_MAX_NCHANNELS": "1"}).size // MIB
    (390, 12)
    >>> [Communicator(gpu("A100-40GB"), ranks=ranks).size // MIB for ranks in (2, 4)]
    [486, 486]
    >>> Communicator(gpu("H200"), ranks=8).size // MIB, Communicator(gpu("H200"), ranks=8).more // MIB
    (774, 288)
    """

    gpu: GPU
    environment: Mapping[str, str] | None = None
    ranks: int = 1
    machines: int = 1

    @property
    def size(self) -> int:
        """The bytes of the communicator, as collectives need it."""
        if self.ranks == 1:
            return _ALONE + self._limited(_MOST_CHANNELS) * self._channel
        return _ALONE + _power_of_two(self.channels) * self._channel + self._rings + self._multicast

    @property
    def more(self) -> int:
        """The bytes that other algorithms would need in addition."""
        return self.channels * (self._buffers + _MAPPED) if self.ranks > 1 else 0

    @property
    def of_a_peer(self) -> int:
        """The bytes of the connection to one rank."""
        channels = self.channels if self.machines == 1 else _CHANNELS_TO_A_PEER_BETWEEN_MACHINES
        return _power_of_two(channels) * (self._buffers + _MAPPED) if self.ranks > 1 else 0

    @property
    def channels(self) -> int:
        inside = _CHANNELS.get(interconnect_of(self.gpu).inside.name, _CHANNELS_OF_PCIE)
        return self._limited(inside if self.machines == 1 else _CHANNELS_BETWEEN_MACHINES)

    def _limited(self, channels: int) -> int:
        given = [(self.environment or {}).get(name, "") for name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")]
        return min([channels, *(max(1, int(limit)) for limit in given if limit.isdecimal())])

    @property
    def _channel(self) -> int:
        by_cuda_malloc = (self.environment or {}).get("NCCL_CUMEM_ENABLE") == "0"
        return _CHANNEL_BY_CUDA_MALLOC if by_cuda_malloc else _CHANNEL

    @property
    def _buffers(self) -> int:
        given = {name: (self.environment or {}).get(name, "") for name in _BUFFERS}
        sizes = [int(given[name]) if given[name].isdecimal() else size for name, size in _BUFFERS.items()]
        return -(-sum(sizes) // _MAPPED) * _MAPPED

    @property
    def _on_machine(self) -> int:
        return max(1, self.ranks // self.machines)

    @property
    def _rings(self) -> int:
        """Each channel leaves a machine by one of its GPUs."""
        leaving = -(-self.channels // self._on_machine) if self.machines > 1 else 0
        return self.channels * (self._buffers + _MAPPED) + leaving * (self._buffers - _MAPPED)

    @property
    def _multicast(self) -> int:
        capability = self.gpu.told_capability
        off = (self.environment or {}).get("NCCL_NVLS_ENABLE") == "0"
        by_nvlink = interconnect_of(self.gpu).inside.kind == NVLINK
        if off or not by_nvlink or capability < _MULTICAST_SINCE or self._on_machine < 2:
            return 0
        channels = self._limited(_MULTICAST_CHANNELS.get(capability[0], max(_MULTICAST_CHANNELS.values())))
        return channels * (_MULTICAST_BUFFERS * self._on_machine + _MAPPED)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
