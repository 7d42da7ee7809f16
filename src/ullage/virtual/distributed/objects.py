"""Python objects that ranks exchange: they stay unchanged and use as much GPU memory as their bytes.

Objects gathered from other ranks equal this rank's. Objects that the first rank sends to all are known if it was
followed before; otherwise an object from another rank stays unchanged, with a note.
"""

import contextlib
import copy
import inspect
import io
import pickle
import sys
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import torch

from ullage.errors import UnsupportedOperation
from ullage.units import MIB
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.state import GPUState

_LIKE_ANOTHER = "recv_object_list: objects of another rank are assumed to be like those of the first one, or this one"
_FROM_ANOTHER = "{what}: what another rank sends is not known; the objects stayed as they were"
_TO_ONE = "to one"
_MOST_KEPT = 4 * MIB  # bytes of objects that are kept for other ranks


class ObjectMessages:
    """The objects that this rank sends (`sent`, by recipient) and those that the first rank sent, if it was followed
    before (`received`). `waits` says that unknown objects of another rank were requested."""

    def __init__(self, gpu: GPUState) -> None:
        self._gpu = gpu
        self._packed_bytes = 0
        self._taken: Counter[str] = Counter()
        self.sent: dict[str, list[bytes]] = {}
        self.received: dict[str, list[bytes]] = {}
        self.waits = False

    def send(self, objects: list[Any]) -> None:
        if not any(type(each).__name__ == "_StageBackwardMeta" for each in objects):
            self.sent[_TO_ONE] = [pickle.dumps(objects)]

    def receive(self) -> list[Any]:
        gradients = _gradients_of_a_stage()
        if gradients is not None:
            return [gradients]
        for known in (self.sent, self.received):
            if known.get(_TO_ONE):
                self._gpu.note("ranks", _LIKE_ANOTHER)
                received: list[Any] = pickle.loads(known[_TO_ONE][-1])
                return received
        self.waits = True
        raise UnsupportedOperation("this rank waits for objects of another one, which no rank sends")

    def tell(self, what: str, objects: list[Any]) -> None:
        """Record objects that this rank sends to all ranks of a group."""
        packed = b""
        with contextlib.suppress(Exception):  # whatever their own code raises
            packed = pickle.dumps(objects)
        if self._packed_bytes + len(packed) > _MOST_KEPT:
            packed = b""
        self._packed_bytes += len(packed)
        self.sent.setdefault(what, []).append(packed)  # an empty text replaces an object that is not kept

    def hear(self, what: str) -> list[Any] | None:
        """Return the objects that another rank sends to all, if they are known."""
        known, place = self.received.get(what, []), self._taken[what]
        self._taken[what] += 1
        if place < len(known) and known[place]:
            with contextlib.suppress(Exception):
                received: list[Any] = pickle.loads(known[place])
                return received
        self.waits = True
        self._gpu.note("ranks", _FROM_ANOTHER.format(what=what.partition(" ")[0]))
        return None


def _gradients_of_a_stage() -> Any:
    """Return the next pipeline stage's description of its gradients, if a stage requests it
    (`PipelineStage._recv_meta`): they look like the stage's outputs."""
    asking = caller("_recv_meta")
    if asking is None or asking.f_locals["src_stage"] < asking.f_locals["self"].stage_index:
        return None
    home: Any = sys.modules["torch.distributed.pipelining._utils"]
    outputs = asking.f_locals["self"]._stage_meta.outputs
    return home._StageBackwardMeta(backward_metas=home._derive_grad_metas(outputs))


def vote_of_stages() -> torch.Tensor | None:
    """Return the other stages' vote, if a pipeline stage asks whether all know their shapes: the same as this one's
    (`PipelineStage._warmup_forward_vote`, PyTorch 2.13)."""
    for name in ("_warmup_forward_vote", "_warmup_backward_result"):
        if (asking := caller(name)) is not None:
            stage: Any = asking.f_locals["self"]
            mode: Any = sys.modules["torch.distributed.pipelining._utils"].InferenceMode
            return torch.tensor([int(not mode.needs_dynamic(stage._user_meta, True))], dtype=torch.int32)
    return None


def caller(name: str) -> Any:
    """Return the calling frame of this name, or `None`."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame


def object_collectives(gpu: GPUState, groups: Any, home: Any) -> dict[str, Any]:
    """Return replacements for the collectives of `torch.distributed` on objects, by name."""
    messages: ObjectMessages = groups.messages

    def gathered(obj: Any, group: Any) -> AbstractContextManager[None]:
        """Hold an object's bytes, those of all, and those of all again in NCCL's one tensor."""
        size = size_of(obj)
        return _on_gpu(gpu, groups, group, size, size * group.size(), size * group.size())

    def all_gather_object(object_list: list[Any], obj: Any, group: Any) -> None:
        with gathered(obj, group):
            object_list[:] = _of_all_ranks(obj, group.rank(), len(object_list))

    def gather_object(obj: Any, object_gather_list: list[Any] | None, group: Any, **options: Any) -> None:
        with gathered(obj, group):
            if object_gather_list:
                object_gather_list[:] = [obj] * len(object_gather_list)

    def broadcast_object_list(object_list: list[Any], group: Any, **options: Any) -> None:
        source, what = _source("broadcast_object_list", group, options)
        if source == home.get_rank():
            messages.tell(what, object_list)
        elif (received := messages.hear(what)) is not None:
            object_list[:] = received
        with _on_gpu(gpu, groups, group, size_of(object_list)):
            pass

    def scatter_object_list(
        scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None, group: Any, **options: Any
    ) -> None:
        source, what = _source("scatter_object_list", group, options)
        objects = scatter_object_input_list
        if source == home.get_rank() and objects:
            messages.tell(what, objects)
        else:
            objects = messages.hear(what)
        if objects is not None:
            scatter_object_output_list[0] = objects[group.rank()]

    def send_object_list(object_list: list[Any], group: Any, **options: Any) -> None:
        groups.send_to_one(group)
        messages.send(object_list)

    def recv_object_list(object_list: list[Any], group: Any, **options: Any) -> Any:
        groups.send_to_one(group)
        object_list[:] = messages.receive()
        return options.get("group_src") if options.get("src") is None else options["src"]

    def _source(what: str, group: Any, options: dict[str, Any]) -> tuple[int, str]:
        ranks = home.get_process_group_ranks(group)
        place = options.get("group_src")
        source = ranks[place] if place is not None else options.get("src") or 0
        return source, f"{what} {source} {ranks[0]}-{ranks[-1]}/{len(ranks)}"

    whole = (all_gather_object, gather_object)
    of_lists = (broadcast_object_list, scatter_object_list, send_object_list, recv_object_list)
    return {each.__name__: _while_groups_stand(groups, home, each) for each in (*whole, *of_lists)}


def _while_groups_stand(groups: Any, home: Any, here: Any) -> Any:
    original = getattr(home, here.__name__)
    signature = inspect.signature(original)

    def call(*args: Any, **options: Any) -> Any:
        if not groups.stand:
            return original(*args, **options)
        given = signature.bind(*args, **options)
        given.apply_defaults()
        named = given.arguments
        named["group"] = named["group"] or home.group.WORLD
        if home._rank_not_in_group(named["group"]):
            return None
        if groups.backend(named["group"]) == "nccl":  # which sends objects by way of the GPU
            groups.communicate(named["group"])
        taken = inspect.signature(here).parameters
        rest = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        return here(**{name: value for name, value in named.items() if rest or name in taken})

    return call


def _on_gpu(gpu: GPUState, groups: Any, group: Any, *sizes: int) -> AbstractContextManager[None]:
    """Hold objects as byte tensors for a while: on the GPU with NCCL."""
    return gpu.memory.holding(*(size for size in sizes if size and groups.backend(group) == "nccl"))


def size_of(obj: Any) -> int:
    """Return the bytes of an object as PyTorch sends it, including GPU tensors; 0 if it cannot be sent."""
    packer = _Packer(written := io.BytesIO())
    try:
        packer.dump(obj)
    except Exception:  # of the object's own code
        return 0
    return written.tell() + packer.of_tensors


class _Packer(pickle.Pickler):
    """Counts the bytes of tensors that have none."""

    of_tensors = 0

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            self.of_tensors += obj.nbytes
        return NotImplemented


# Optimizer states of other ranks, if this rank requests them


def _of_all_ranks(own: Any, rank: int, ranks: int) -> list[Any]:
    """Return each rank's object; the others' equal this one's unless known to differ."""
    if (asking := caller("_map_param_key_to_optim_keys")) is not None:
        # All ranks of FSDP together hold a part of the optimizer's state for every trained parameter.
        key, infos = asking.f_globals["_OptimStateKey"], asking.f_locals["fqn_to_fsdp_param_info"].items()
        trained = [name for name, info in infos if info.param_requires_grad[info.param_indices[name]]]
        others: list[Any] = [[key((name,), True) for name in trained]] * ranks
    elif caller("_init_from_local_shards") is not None and own is not None:
        others = [_shards_of(own, other - rank) for other in range(ranks)]
    else:
        others = [own] * ranks
    return [*others[:rank], own, *others[rank + 1 :]]


def _shards_of(own: Any, further: int) -> Any:
    """Return the pieces of a `ShardedTensor` of another rank: as large as this one's, side by side."""
    others = copy.deepcopy(own)
    for shard in others.shards_metadata:
        whole = zip(shard.shard_sizes, others.size, strict=True)
        split = next((place for place, (size, all_of_it) in enumerate(whole) if size < all_of_it), 0)
        shard.shard_offsets[split] += further * shard.shard_sizes[split]
        place = shard.placement
        shard.placement = type(place)(f"rank:{place.rank() + further}/{place.device()}")
    return others


def install_zero_redundancy(gpu: GPUState, groups: Any, replacements: Replacements) -> None:
    """`ZeroRedundancyOptimizer.consolidate_state_dict` gathers the states of all ranks, each as a tensor of bytes."""

    def broadcast_object(obj: Any, src_rank: int, group: Any = None, device: Any = "cpu") -> Any:
        asking = caller("consolidate_state_dict")
        home: Any = sys.modules["torch.distributed.distributed_c10d"]
        if src_rank != home.get_rank() and asking is not None:
            obj = _states_of(asking.f_locals["self"], asking.f_locals["rank"])
        with gpu.memory.holding(*([size_of(obj)] if torch.device(device).type == "cuda" else [])):
            received = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), obj)
        return received if src_rank != home.get_rank() else obj

    replacements.when_imported(
        "torch.distributed.optim.zero_redundancy_optimizer",
        lambda module: replacements.put(module, "_broadcast_object", broadcast_object),
    )


def install_checkpoints(groups: Any, replacements: Replacements) -> None:
    """Let `torch.distributed.checkpoint` write this rank's part alone; missing pieces of tensors are no error."""

    def alone(module: Any) -> None:
        begin = module._DistWrapper.__init__

        def init(self: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
            begin(self, group, use_dist and not groups.stand, coordinator_rank)

        replacements.put(module._DistWrapper, "__init__", init)

    def valid(module: Any) -> None:
        check = module._validate_global_plan

        def validate(plan: Any, metadata: Any) -> Any:
            problems = check(plan, metadata)
            return problems if not groups.stand else [] if isinstance(problems, list) else True  # before 2.13 a bool

        replacements.put(module, "_validate_global_plan", validate)

    replacements.when_imported("torch.distributed.checkpoint.utils", alone)
    replacements.when_imported("torch.distributed.checkpoint.default_planner", valid)


def _states_of(optimizer: Any, rank: int) -> dict[str, Any]:
    """Return the states of another rank: like this one's, with the shapes of its parameters."""
    own = optimizer.optim.state_dict()
    one, example = next(iter(optimizer.optim.state.items()), (torch.empty(0), {}))
    states: dict[int, Any] = {}
    groups = []

    def like_example(value: Any, parameter: torch.Tensor) -> Any:
        if isinstance(value, torch.Tensor) and value.shape == one.shape and value.dim():
            return parameter.new_empty(parameter.shape, dtype=value.dtype, device="cpu")
        return value

    for like, part in zip(own["param_groups"], optimizer._partition_parameters()[rank], strict=True):
        first = len(states)
        groups.append({**like, "params": list(range(first, first + len(part["params"])))})
        for number, parameter in enumerate(part["params"], first):
            states[number] = {name: like_example(value, parameter) for name, value in example.items()}
    return {"state": {number: state for number, state in states.items() if state}, "param_groups": groups}
