"""What PyTorch's profiler saw of a training run on the CPU: memory blocks linked to operators and phases.

An entry of the trace names an address and a size; a block is an allocation with the next release of that address. The
operators around an allocation say in which phase it was made: the backward pass, the optimizer's step, or neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

FIRST_FORWARD = "ullage::first_forward"
STEP, ZERO_GRAD, BACKWARD = "Optimizer.step#", "Optimizer.zero_grad#", "autograd::engine::evaluate_function"
MAKING, FORWARD, IN_BACKWARD, IN_STEP = "making", "forward", "backward", "step"


@dataclass
class Block:
    """A piece of memory: when it was taken and given back (`None`: never), by which operator, in which phase."""

    start: int
    end: int | None
    size: int
    address: int
    operator: str | None
    phase: str


@dataclass
class CpuTrace:
    """A training run on the CPU. Times are nanoseconds; `steps` and `zero_grads` are windows (begin, end).

    >>> CpuTrace(blocks=[Block(5, None, 512, 1, "aten::empty", FORWARD)], steps=[(7, 9)]).blocks[0].size
    512
    """

    blocks: list[Block] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    zero_grads: list[tuple[int, int]] = field(default_factory=list)
    first_forward: int | None = None
    parameters: list[tuple[int, int]] = field(default_factory=list)  # address and size, in the model's order
    convolutions: bool = False
    seconds: float = 0.0


def read_trace(roots: list[Any], parameters: list[tuple[int, int]]) -> CpuTrace:
    """The trace in a profiler's tree of events (`kineto_results.experimental_event_tree()`)."""
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
    """Every event with the names of the events around it, outermost first."""
    waiting: list[tuple[Any, tuple[str, ...]]] = [(root, ()) for root in reversed(roots)]
    while waiting:
        event, chain = waiting.pop()
        yield event, chain
        inner = (*chain, event.name)
        waiting.extend((child, inner) for child in reversed(event.children))


def _blocks(entries: list[tuple[int, Any, tuple[str, ...]]], first_forward: int | None) -> list[Block]:
    """Allocations paired with the next release of the same address, in the order of time."""
    blocks: list[Block] = []
    open_at: dict[int, Block] = {}
    for time, fields, chain in entries:
        if fields.alloc_size > 0:
            operator = chain[-1] if chain else None
            block = Block(time, None, fields.alloc_size, fields.ptr, operator, _phase(time, chain, first_forward))
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
