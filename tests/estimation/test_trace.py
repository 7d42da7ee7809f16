"""The trace of a run agrees with the estimate and can be sent on, and PyTorch's viewer reads its snapshot."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from ullage.allocator import AllocatorConfig
from ullage.errors import InvalidValue
from ullage.estimation.asking import estimate
from ullage.estimation.timeline import snapshot
from ullage.estimation.timeline.trace import Trace


def train():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 10)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(64, 3, 32, 32, device="cuda")).sum().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def run():
    trace = Trace()
    return estimate(train, gpu="H200", trace=trace), trace


def live(trace, clock):
    return (trace.begin <= clock) & ((trace.end == -1) | (trace.end > clock))


def test_the_trace_agrees_with_the_estimate(run):
    e, trace = run
    alive = live(trace, trace.peaks[0])
    assert trace.size[alive].sum() == e.peak_allocated
    for number, kind in enumerate(trace.kinds):
        assert trace.size[alive & (trace.kind == number)].sum() == e.breakdown.get(kind, 0)
    assert trace.reserved[:, 1].max() <= e.peak_reserved
    assert len(trace.steps) == e.steps == 3 and list(trace.steps) == sorted(trace.steps)


def test_it_can_be_sent_to_another_process(run):
    _, trace = run
    again = Trace()
    again.read(trace.to_bytes())
    for name in ("begin", "end", "size", "kind", "place", "owner", "places", "steps", "reserved", "events", "peaks"):
        assert np.array_equal(getattr(trace, name), getattr(again, name)), name
    assert (again.operators, again.modules, again.context) == (trace.operators, trace.modules, trace.context)


def test_a_job_that_does_not_fit_has_the_trace_of_its_whole_run():
    trace = Trace()
    e = estimate(lambda: torch.empty(10 * 2**30, dtype=torch.uint8, device="cuda"), gpu="RTX-4060", trace=trace)
    assert not e.fits and trace.size.tolist() == [10 * 2**30]


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_pytorch_reads_the_snapshot_back(tmp_path, settings):
    from torch.cuda import _memory_viz

    trace, file = Trace(), tmp_path / "out.pickle"
    e = estimate(train, gpu="H200", trace=trace, allocator=AllocatorConfig.parse(settings))
    snapshot.write(trace, file)
    data = pickle.loads(file.read_bytes())
    segments = data["segments"]
    assert sum(segment["total_size"] for segment in segments) == e.peak_reserved
    for segment in segments:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    allocated = sum(segment["allocated_size"] for segment in segments)
    assert allocated == trace.size[trace.end == -1].sum()
    assert f"segments: {len(segments)}" in _memory_viz.segsum(data)
    assert f"{len(trace.events)} entries" in _memory_viz.trace(data)
    assert "conv" in _memory_viz.memory(data, format_flamegraph=lambda text: text)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<script" in plot(data)
    names = {frame["name"] for entry in data["device_traces"][0] for frame in entry["frames"]}
    assert {"step 2", "aten.convolution_backward.default", "Adam.step()"} <= names


@pytest.mark.slow
def test_pytorchs_command_opens_the_snapshot(run, tmp_path):
    snapshot.write(run[1], tmp_path / "out.pickle")
    command = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", "out.pickle", "-o", "out.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.html").stat().st_size > 10_000


def test_mistakes(tmp_path, run):
    with pytest.raises(InvalidValue, match="this trace is empty"):
        Trace().to_bytes()
    with pytest.raises(InvalidValue, match="cannot write .*No such file"):
        snapshot.write(run[1], tmp_path / "no" / "folder")
    with pytest.raises(InvalidValue, match="cannot write .*No space left"):
        snapshot.write(run[1], "/dev/full")
