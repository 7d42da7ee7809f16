"""What a call asks of the allocator, as tests write it down."""

from contextlib import contextmanager


@contextmanager
def recorded_events(gpu):
    """Every request as its size, and every free of one of them as -1 minus its number."""
    events, alive, taken = [], {}, 0

    def on_event(action, address, size):
        nonlocal taken
        if action == 0:
            alive[address] = taken
            taken += 1
            events.append(size)
        elif action == 1 and address in alive:
            events.append(-1 - alive.pop(address))

    gpu.memory.allocator.on_event = on_event
    try:
        yield events
    finally:
        gpu.memory.allocator.on_event = None


def requests(gpu, call):
    """Sizes asked for during a call, and what it returns."""
    with recorded_events(gpu) as events:
        result = call()
    return [size for size in events if size >= 0], result
