"""Turns a run on the CPU into the requests of a run on a GPU, and replays these on the caching allocator.

The rules follow the lifecycles that the papers describe:

- parameters and buffers exist before the first iteration and stay;
- batch data is moved to the GPU at the beginning of an iteration and freed at its end;
- a gradient is allocated when the backward pass creates it, and freed at the next `zero_grad`;
- optimizer state is allocated in the step that creates it, and stays;
- activations and temporaries live as they did on the CPU.

Blocks created and freed while the model was built never reach the GPU. Allocations outside of any operator are not the
model's and are left out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field
from typing import Any

from ullage.allocator import NO_LIMIT, Block, CachingAllocator, OutOfMemory
from ullage.errors import InvalidValue

# What PyTorch's profiler saw of a training run on the CPU: memory blocks linked to operators and phases.
#
# An entry of the trace names an address and a size; a block is an allocation with the next release of that address. The
# operators around an allocation say in which phase it was made: the backward pass, the optimizer's step, or neither.

FIRST_FORWARD = "ullage::first_forward"
STEP, ZERO_GRAD, BACKWARD = "Optimizer.step#", "Optimizer.zero_grad#", "autograd::engine::evaluate_function"
MAKING, FORWARD, IN_BACKWARD, IN_STEP = "making", "forward", "backward", "step"


@dataclass
class ProfiledBlock:
    """A block of memory: the times of its allocation and release (`None`: never), its operator, and its phase."""

    start: int
    end: int | None
    size: int
    address: int
    operator: str | None
    phase: str


@dataclass
class CpuTrace:
    """A training run on the CPU. Times are nanoseconds; `steps` and `zero_grads` are windows (begin, end)."""

    blocks: list[ProfiledBlock] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    zero_grads: list[tuple[int, int]] = field(default_factory=list)
    first_forward: int | None = None
    parameters: list[tuple[int, int]] = field(default_factory=list)  # address and size, in the model's order
    convolutions: bool = False
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "blocks": [astuple(block) for block in self.blocks]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CpuTrace":
        """Read the result of `to_dict`, also if JSON has turned its tuples into lists."""
        pairs = {name: [tuple(pair) for pair in values[name]] for name in ("steps", "zero_grads", "parameters")}
        return cls(**{**values, **pairs, "blocks": [ProfiledBlock(*block) for block in values["blocks"]]})


def read_trace(roots: list[Any], parameters: list[tuple[int, int]]) -> CpuTrace:
    """Read the trace in a profiler's tree of events (`kineto_results.experimental_event_tree()`)."""
    trace = CpuTrace(parameters=parameters)
    entries = []
    for event, chain in _walk(roots):
        if event.name == "[memory]":
            entries.append((event.start_time_ns, event.extra_fields, chain))
            continue
        if event.name.startswith(STEP):
            trace.steps.append((event.start_time_ns, event.end_time_ns))
        elif event.name.startswith(ZERO_GRAD):
            trace.zero_grads.append((event.start_time_ns, event.end_time_ns))
        elif event.name == FIRST_FORWARD:
            trace.first_forward = event.start_time_ns
        elif event.name == "aten::convolution":
            trace.convolutions = True
    trace.steps.sort()
    trace.zero_grads.sort()
    trace.blocks = _blocks(sorted(entries, key=lambda entry: entry[0]), trace.first_forward)
    return trace


def _walk(roots: list[Any]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield every event with the names of the events around it, outermost first."""
    waiting: list[tuple[Any, tuple[str, ...]]] = [(root, ()) for root in reversed(roots)]
    while waiting:
        event, chain = waiting.pop()
        yield event, chain
        inner = (*chain, event.name)
        waiting.extend((child, inner) for child in reversed(event.children))


def _blocks(entries: list[tuple[int, Any, tuple[str, ...]]], first_forward: int | None) -> list[ProfiledBlock]:
    """Pair allocations with the next release of the same address, in order of time."""
    blocks: list[ProfiledBlock] = []
    open_at: dict[int, ProfiledBlock] = {}
    for time, fields, chain in entries:
        if fields.alloc_size > 0:
            operator = chain[-1] if chain else None
            block = ProfiledBlock(
                time, None, fields.alloc_size, fields.ptr, operator, _phase(time, chain, first_forward)
            )
            open_at[fields.ptr] = block
            blocks.append(block)
        elif fields.alloc_size < 0 and fields.ptr in open_at:
            open_at.pop(fields.ptr).end = time
    return blocks


def _phase(time: int, chain: tuple[str, ...], first_forward: int | None) -> str:
    for name in chain:
        if name.startswith(STEP):
            return IN_STEP
        if name.startswith(BACKWARD):
            return IN_BACKWARD
    return MAKING if first_forward is not None and time < first_forward else FORWARD


@dataclass(frozen=True)
class Life:
    """A block of the GPU run: its time, size, and part of the breakdown."""

    start: int
    end: int | None
    size: int
    part: str


@dataclass
class ReplayOutcome:
    """The result of the replay: peaks, live memory at the peak of allocated memory, and the message if it ran out."""

    peak_allocated: int
    peak_reserved: int
    live: dict[str, int] = field(default_factory=dict)
    out_of_memory: str | None = None


def orchestrate(trace: CpuTrace) -> list[Life]:
    """Return the blocks of the GPU run.

    >>> state = ProfiledBlock(12, 14, 64, 1, "aten::zeros_like", IN_STEP)      # a temporary of the optimizer
    >>> trace = CpuTrace(blocks=[state], steps=[(10, 20)], first_forward=5, parameters=[(9, 256)])
    >>> [(life.part, life.size) for life in orchestrate(trace)]
    [('parameters', 256), ('optimizer', 64)]
    """
    if not trace.steps or trace.first_forward is None:
        raise InvalidValue("the run on the CPU has no optimizer step after a forward pass; nothing to put in order")
    begin = trace.first_forward
    lives = [Life(0, None, size, "parameters") for _, size in trace.parameters]
    addresses = {address for address, _ in trace.parameters}
    for block in trace.blocks:
        if block.operator is None:
            continue
        if block.phase == MAKING:
            alive = block.end is None or block.end > begin
            if alive and block.address not in addresses:
                lives += _batch_data(block, trace)
        else:
            lives.append(_placed(block, trace))
    return lives


def _batch_data(block: ProfiledBlock, trace: CpuTrace) -> list[Life]:
    """Return the lives of a batch: one per iteration if the loop keeps it on the CPU, as traced otherwise."""
    ends = [end for _, end in trace.steps]
    if block.end is not None and block.end < ends[-1]:
        return [Life(block.start, block.end, block.size, "activations")]
    starts = [block.start, *ends[:-1]]
    return [Life(start, end, block.size, "activations") for start, end in zip(starts, ends, strict=True)]


def _placed(block: ProfiledBlock, trace: CpuTrace) -> Life:
    if block.phase == IN_BACKWARD:
        step = next((step for step in trace.steps if step[0] >= block.start), None)
        if step is not None and (block.end is None or block.end > step[0]):
            return Life(block.start, _gradient_end(block, step, trace), block.size, "gradients")
    if block.phase == IN_STEP:
        step = next(step for step in trace.steps if step[1] >= block.start)
        survives = block.end is None or block.end > step[1]
        return Life(block.start, None if survives else block.end, block.size, "optimizer")
    assert block.phase in (FORWARD, IN_BACKWARD)
    return Life(block.start, block.end, block.size, "activations")


def _gradient_end(block: ProfiledBlock, step: tuple[int, int], trace: CpuTrace) -> int | None:
    """Return the next `zero_grad` after the step that uses the gradient; one that is zeroed in place stays."""
    if block.end is None:
        return None
    return next((begin for begin, _ in trace.zero_grads if begin >= step[1]), block.end)


def simulate(lives: Iterable[Life], capacity: int) -> ReplayOutcome:
    """Replay blocks on a GPU with this capacity; if it runs out, the peaks are those without a limit."""
    requests = _in_order(lives)
    try:
        return _replay(requests, CachingAllocator(capacity))
    except OutOfMemory as error:
        outcome = _replay(requests, CachingAllocator(NO_LIMIT))
        outcome.out_of_memory = str(error)
        return outcome


def _in_order(lives: Iterable[Life]) -> list[tuple[bool, int, Life]]:
    """Return requests (is an allocation, number of the block, block) by time; at equal times releases come first."""
    requests = []
    for number, life in enumerate(lives):
        requests.append((life.start, 1, number, life))
        if life.end is not None:
            requests.append((life.end, 0, number, life))
    requests.sort(key=lambda request: request[:3])
    return [(bool(is_allocation), number, life) for _, is_allocation, number, life in requests]


def _replay(requests: list[tuple[bool, int, Life]], allocator: CachingAllocator) -> ReplayOutcome:
    held: dict[int, Block] = {}
    live: dict[str, int] = {}
    at_peak: dict[str, int] = {}
    peak = 0
    for is_allocation, number, life in requests:
        if is_allocation:
            held[number] = allocator.malloc(life.size)
            live[life.part] = live.get(life.part, 0) + held[number].size
            if allocator.peak_allocated > peak:
                peak, at_peak = allocator.peak_allocated, dict(live)
        elif number in held:
            block = held.pop(number)
            live[life.part] -= block.size
            allocator.free(block)
    return ReplayOutcome(allocator.peak_allocated, allocator.peak_reserved, at_peak)
