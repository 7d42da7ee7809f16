"""Streams and events: allocations go to the stream that is current, in the thread where it is."""

import threading

import pytest
import torch

from ullage.virtual import virtual_gpu


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


def test_a_stream_chosen_in_one_thread_is_not_current_in_another(gpu):
    in_side_stream, done, made = threading.Event(), threading.Event(), {}

    def copy_ahead():
        with torch.cuda.stream(torch.cuda.Stream()):
            in_side_stream.set()
            assert done.wait(10)
            made["thread"] = torch.zeros(10, device="cuda")

    thread = threading.Thread(target=copy_ahead)
    thread.start()
    assert in_side_stream.wait(10)
    made["main"] = torch.zeros(10, device="cuda")
    done.set()
    thread.join()
    assert stream_of(made["main"]) == 0 != stream_of(made["thread"])


def test_classes_imported_before_give_the_same_streams():
    from torch.cuda import Event, Stream

    with virtual_gpu("H200"):
        assert isinstance(Stream(), torch.cuda.Stream)
        assert Event().query()
