"""Streams and events: allocations go to the stream that is current, in the thread where it is."""

import threading

import pytest
import torch

from ullage.virtual import virtual_gpu
from ullage.virtual.memory.launch_clock import MOST_LAUNCHES


@pytest.fixture
def gpu():
    with virtual_gpu("H200") as gpu:
        yield gpu


def stream_of(tensor):
    address = tensor.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return segment["stream"]
    raise AssertionError("the tensor is in no segment")


def test_allocations_go_to_the_current_stream(gpu):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        there = torch.zeros(10, device="cuda")
    with side:
        there_too = torch.zeros(10, device="cuda")
    here = torch.zeros(10, device="cuda")
    assert (stream_of(there), stream_of(there_too), stream_of(here)) == (side.stream_id, side.stream_id, 0)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_streams_are_pytorchs_kind(gpu):
    side, general = torch.cuda.Stream(priority=-1), torch.Stream(device="cuda")
    assert isinstance(side, torch.cuda.Stream) and isinstance(side, torch.Stream)
    assert side != torch.cuda.Stream() and side.priority == -1
    assert general.device == side.device == torch.device("cuda:0")
    assert torch.cuda.default_stream().cuda_stream == 0 != side.cuda_stream
    torch.zeros(1, device="cuda").record_stream(side)
    torch.cuda.set_stream(side)
    assert gpu.memory.stream == side.stream_id
    torch.cuda.set_stream(torch.cuda.default_stream())
    if hasattr(torch.cuda, "get_stream_from_external"):  # since 2.7
        assert torch.cuda.ExternalStream(0x1234) == torch.cuda.get_stream_from_external(0x1234)


def test_after_32_streams_they_come_again_as_in_pytorch(gpu):
    streams = [torch.cuda.Stream() for _ in range(33)]
    assert streams[32] == streams[0] != streams[31]


def test_nothing_is_ever_waited_for(gpu):
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    event.record(side)
    torch.cuda.current_stream().wait_event(event)
    side.synchronize()
    event.synchronize()
    assert side.query() and event.query()


def test_the_time_between_events_is_the_hosts_and_noted(gpu):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    end.record()
    assert start.elapsed_time(end) > 0
    assert any("CUDA events" in note for note in gpu.notes)
    with pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(end)


def test_stream_chosen_in_one_thread_is_not_current_in_another(gpu):
    in_side_stream, done, made = threading.Event(), threading.Event(), {}

    def copy_ahead():
        with torch.cuda.stream(torch.cuda.Stream()):
            in_side_stream.set()
            assert done.wait(60)
            made["thread"] = torch.zeros(10, device="cuda")

    thread = threading.Thread(target=copy_ahead)
    thread.start()
    assert in_side_stream.wait(60)
    made["main"] = torch.zeros(10, device="cuda")
    done.set()
    thread.join()
    assert stream_of(made["main"]) == 0 != stream_of(made["thread"])


def test_classes_imported_before_give_the_same_streams():
    from torch.cuda import Event, Stream

    with virtual_gpu("H200"):
        assert isinstance(Stream(), torch.cuda.Stream)
        assert Event().query()


def test_backward_pass_runs_on_the_streams_of_its_forward_pass(gpu):
    weight = torch.ones(1 << 20, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    here = weight * 2
    with torch.cuda.stream(side):
        there = here * 3
    used = []
    there.register_hook(lambda gradient: used.append(torch.cuda.current_stream()))
    here.register_hook(lambda gradient: used.append(stream_of(gradient)))
    there.sum().backward()
    assert used[1] == side.stream_id  # the gradient that `* 3` gave
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def reserved_by_batches(gpu, read, width=8192):
    """Copy batches ahead in a side stream, and work on them in the default one."""
    side, weight = torch.cuda.Stream(), torch.zeros(width, width, device="cuda")
    for _ in range(8):
        with torch.cuda.stream(side):
            batch = torch.zeros(16 << 20, dtype=torch.uint8, device="cuda")
        batch.record_stream(torch.cuda.current_stream())
        loss = torch.mm(weight, weight)[0, 0]
        del batch
        if read:
            loss.item()
    return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot() if segment["stream"] == side.stream_id)


def test_recorded_memory_is_not_free_at_once(gpu):
    assert reserved_by_batches(gpu, read=False) == 8 * (16 << 20)
    assert any("record_stream" in note for note in gpu.notes)


def test_recorded_memory_is_free_if_the_gpu_waits_for_the_host(gpu):
    """As seen on an H200 that nobody else used; the bound is for one that is far behind."""
    assert reserved_by_batches(gpu, read=False, width=64) == 16 << 20
    assert gpu.upper - gpu.process_memory >= 8 * (16 << 20)
    assert any("record_stream" in note for note in gpu.notes)


def test_recorded_memory_is_free_when_the_host_has_waited(gpu):
    assert reserved_by_batches(gpu, read=True) == 16 << 20


@pytest.mark.parametrize("width", [64, 8192])
def test_recorded_memory_waits_for_a_gpu_slower_than_its_host(gpu, width):
    """As a layer's weights do that FSDP has gathered: a product of 8192 x 8192 takes an H200 20 ms."""
    side = torch.cuda.Stream()
    left = torch.zeros(width, width, device="cuda")
    begin = len(gpu.memory.requests)
    for _ in range(12):
        with torch.cuda.stream(side):
            weights = torch.zeros(16 << 20, dtype=torch.uint8, device="cuda")
        weights.record_stream(torch.cuda.current_stream())
        for _ in range(8):
            torch.mm(left, left)
        del weights
    segments = [each for each in torch.cuda.memory_snapshot() if each["stream"] == side.stream_id]
    assert len(segments) == 12 if width > 64 else len(segments) < 4
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    gpu.memory.repeat(gpu.memory.requests[begin:], times=1, quiet=1)
    assert torch.cuda.max_memory_allocated() == peak < 3 * (16 << 20) + 3 * 4 * width**2 + (66 << 20), "they are free"
    more = 0 if width > 64 else 8 * (16 << 20)
    assert more <= gpu.upper - gpu.process_memory < more + (100 << 20), "what the figure has, the bound does not add"


@pytest.mark.parametrize("late", [True, False])
def test_an_event_waits_for_what_came_before_it(gpu, late):
    """So FSDP keeps the host from running ahead: it waits for the layer before the last, not for the last one."""
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    left = torch.zeros(8192, 8192, device="cuda")
    weights = torch.zeros(16 << 20, dtype=torch.uint8, device="cuda")
    if not late:
        event.record(side)
    weights.record_stream(side)
    with torch.cuda.stream(side):
        torch.mm(left, left)
    del weights
    if late:
        event.record(side)
    event.synchronize()
    assert len(gpu.memory.waiting) == (0 if late else 1)
    assert (gpu.memory.waiting.launch_clock.host >= gpu.memory.waiting.launch_clock.done()) is late


@pytest.mark.parametrize("waits", ["not", "for the stream", "for an event"])
def test_recorded_memory_waits_for_its_stream_alone(gpu, waits):
    """Weights that FSDP has cast are free when the stream that gathers them has them, while a layer still runs."""
    side, left = torch.cuda.Stream(), torch.zeros(8192, 8192, device="cuda")
    weights = torch.zeros(16 << 20, dtype=torch.uint8, device="cuda")
    weights.record_stream(side)
    torch.mm(left, left)
    if waits == "for the stream":
        side.wait_stream(torch.cuda.current_stream())
    elif waits == "for an event":
        side.wait_event(torch.cuda.current_stream().record_event())
    del weights
    torch.zeros(1, device="cuda")
    assert len(gpu.memory.waiting) == (0 if waits == "not" else 1)


def test_a_host_that_loads_kernels_is_not_ahead(gpu):
    """The first launch of each kernel loads it, for which a GPU has done all that it had."""
    left, side = torch.zeros(2048, 2048, device="cuda"), torch.cuda.Stream()
    torch.zeros(1, device="cuda").record_stream(side)
    behind = []
    for _ in range(2):
        torch.mm(left, left)
        left.sum()
        behind.append(gpu.memory.waiting.launch_clock.done() - gpu.memory.waiting.launch_clock.host > 1e-4)
    assert behind == [False, True]


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_gradient_that_goes_to_another_stream_waits_for_it(gpu, elsewhere):
    """Autograd records it on the stream of the node that uses it, as those of weights that FSDP has gathered there."""
    weights = torch.zeros(4 << 20, device="cuda", requires_grad=True)
    with torch.cuda.stream(torch.cuda.Stream() if elsewhere else torch.cuda.default_stream()):
        view = weights * 2
    out = view * 3
    out.backward(torch.zeros_like(out))
    assert [entry.block.size for entry in gpu.memory.waiting] == ([16 << 20] if elsewhere else [])


def test_recorded_memory_counts_as_free(gpu):
    batch = torch.zeros(16 << 20, dtype=torch.uint8, device="cuda")
    batch.record_stream(torch.cuda.Stream())
    del batch
    assert torch.cuda.memory_allocated() == 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


@pytest.mark.parametrize("events", [0, 100, MOST_LAUNCHES])
def test_events_use_the_queue_of_launches(gpu, events):
    wide = torch.zeros(20_000, 20_000, device="cuda")
    side = torch.cuda.Stream()
    wide.record_stream(side)  # from here on there are clocks
    wide @ wide
    late = gpu.memory.waiting.launch_clock.done()
    for _ in range(events):
        torch.cuda.Event().record()
    torch.zeros(1, device="cuda")
    assert (gpu.memory.waiting.launch_clock.host >= late) is (events == MOST_LAUNCHES)
