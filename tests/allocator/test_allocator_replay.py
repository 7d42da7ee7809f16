"""Replaying histories: the recorded ones where they are, and small ones computed by hand."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy
import pytest
from tests.allocator.replaying import History, replay

HAND_COMPUTED = sorted((Path(__file__).parent / "histories").glob("*.json"))


@pytest.fixture
def recorded(reference) -> list[Path]:
    return sorted(reference("groundtruth/events").glob("*.npz"))


def difference_of(path: Path) -> str | None:
    result = replay(History.load(path))
    return None if result.first_difference is None else f"{path.name}: {result.first_difference}"


def has_equal_segments(path: Path) -> bool:
    history = History.load(path)
    found = replay(history, true_segments=False).segments
    return [size for _, size in found] == [size for _, size in history.segments()]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_every_recorded_block_and_segment_comes_out_exactly(every: int, recorded: list[Path]) -> None:
    """Every fourth history in a minute's budget, all of them in `make test-all`."""
    with ProcessPoolExecutor() as workers:
        differences = [text for text in workers.map(difference_of, recorded[::every], chunksize=4) if text]
    assert differences == []


def test_imitated_addresses_nearly_always_give_same_segments(recorded: list[Path]) -> None:
    # Every third history keeps the test short; over all of them it is 237 of 243.
    sample = recorded[::3]
    with ProcessPoolExecutor() as workers:
        equal = sum(workers.map(has_equal_segments, sample, chunksize=4))
    assert equal >= 0.95 * len(sample)


@pytest.mark.parametrize("path", HAND_COMPUTED, ids=lambda path: path.stem)
def test_hand_computed_histories_come_out_exactly(path: Path) -> None:
    history = History.load(path)
    result = replay(history)
    assert result.first_difference is None, str(result.first_difference)
    assert result.segments == history.segments()
    assert result.block_addresses == [event.addr for event in history.events() if event.name == "alloc"]


def test_there_are_hand_computed_histories() -> None:
    assert len(HAND_COMPUTED) >= 5


def test_the_first_difference_names_the_event() -> None:
    history = History([3, 0, 0], [0, 0, 1024], [2097152, 100, 100])
    difference = replay(history).first_difference
    assert difference is not None
    assert difference.index == 2
    assert str(difference) == "event 2: alloc of 100 at 1024 expected, alloc of 100 at 512 got"


def test_a_replay_that_ends_early_says_so() -> None:
    difference = replay(History([3, 0, 3], [0, 0, 2097152], [2097152, 100, 2097152])).first_difference
    assert difference is not None
    assert difference.got is None
    assert "nothing got" in str(difference)


def test_replay_that_needs_more_segments_than_recorded_says_so() -> None:
    difference = replay(History([3, 0, 0], [0, 0, 512], [2097152, 1048576 * 2, 512])).first_difference
    assert difference is not None
    assert difference.index == 0


def test_frees_of_blocks_from_before_the_recording_are_reported() -> None:
    difference = replay(History([1, 2], [512, 512], [100, 100])).first_difference
    assert difference is not None
    assert difference.index == 0


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="lists of one length"):
        History([0], [0, 0], [0])


def test_an_unknown_file_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.npz or \.json"):
        History.load(tmp_path / "history.csv")


def test_arrays_are_read(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "one.npz", action=[3, 0], addr=[0, 0], size=[2097152, 512])
    assert replay(History.load(tmp_path / "one.npz")).first_difference is None
