"""Inductor's trees of CUDA graphs on the virtual GPU: PyTorch's own code, over addresses of the allocator's blocks.

Between recordings PyTorch restores the state that the trees' private pool had after an earlier graph, and makes tensors
over the addresses of that graph's outputs. This module replaces the C++ functions for that.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch

from ullage.virtual.call.native import storage_of, tensor_without_data, view_without_data
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.memory.allocations import Allocation
from ullage.virtual.state import GPUState


class GraphTrees:
    """Storages at given addresses, and the owners of a restored pool's blocks."""

    def __init__(self, gpu: GPUState) -> None:
        self._memory = gpu.memory
        self._held: dict[int, Any] = {}  # by address: spans of a restored pool that no tensor owns
        self._tensors: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()  # by storage
        self._raw_delete: Any = torch._C._cuda_cudaCachingAllocator_raw_delete

    def storage_at(self, address: int, device: Any, nbytes: int) -> Any:
        """Return a storage over memory that it does not own."""
        storage = storage_of(tensor_without_data((nbytes,), (1,), torch.uint8))
        storage.ullage_address, storage.ullage_is_new = address, True
        return storage

    def tensor_over(self, metadata: dict[str, Any], storage: Any) -> torch.Tensor:
        size, stride, offset = metadata["size"], metadata["stride"], metadata["storage_offset"]
        if getattr(storage, "ullage_is_new", False):
            made = tensor_without_data(size, stride, metadata["dtype"])
            storage_of(made).ullage_address = storage.ullage_address
        else:
            with torch._C._DisableTorchDispatch():
                made = view_without_data(self._tensors[storage._cdata], size, stride, offset)
        self._tensors[storage_of(made)._cdata] = made
        return made

    def restore(self, device: int, state: Any, stale: Any = (), live: Any = ()) -> None:
        held = self._memory.restore_pool(state)
        for pointer in live:
            storage = torch.UntypedStorage._new_with_weak_ptr(pointer)
            span = held.pop(storage.data_ptr(), None)
            if isinstance(span, Allocation):
                self._memory.adopt(storage, span)
        self._held.update({address: span for address, span in held.items() if isinstance(span, Allocation)})

    def delete(self, address: int) -> None:
        span = self._held.pop(address, None)
        if span is None:
            self._raw_delete(address)
        elif span.block is not None:
            self._memory.give_back(span)

    def free(self, pointer: int) -> None:
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(pointer)
        watch = getattr(storage, "ullage", None)
        if watch is not None and watch.block is not None:
            address = watch.block.address
            self._memory.give_back(watch)
            storage.ullage = None
            storage.ullage_address = address

    def at_addresses(self, tensors: Any, addresses: Any, places: Any) -> bool:
        return all(
            not isinstance(tensors[place], torch.Tensor) or tensors[place].data_ptr() == addresses[place]
            for place in places
        )


def install(gpu: GPUState, replacements: Replacements) -> None:
    trees = GraphTrees(gpu)
    replacements.put_all(
        torch._C,
        {
            "_construct_storage_from_data_pointer": trees.storage_at,
            "_construct_CUDA_Tensor_From_Storage_And_Metadata": trees.tensor_over,
            "_cuda_setCheckpointPoolState": trees.restore,
            "_cuda_cudaCachingAllocator_raw_delete": trees.delete,
            "_free_And_Remove_DeleterFn": trees.free,
            "_has_Standard_Deleter": lambda pointer: True,
            "_set_storage_access_error_msg": lambda tensor, message: None,
            "_set_storage_data_ptr_access_error_msg": lambda pointer, message: None,
            "_tensors_data_ptrs_at_indices_equal": trees.at_addresses,
            "_cuda_get_conv_benchmark_empty_cache": lambda: True,
            "_cudnn_set_conv_benchmark_empty_cache": lambda enabled: None,
        },
    )
    if not hasattr(torch._C, "_cuda_CUDAAllocator_AllocatorState"):
        replacements.put(torch._C, "_cuda_CUDAAllocator_AllocatorState", object)
