"""PyTorch's own lists: every sample of its operators and modules runs on the virtual GPU as it does on the CPU."""

import collections
import warnings

import pytest
from tests.virtual.pytorch_lists import DIFFERENT, LEFT_OUT, NOT_ON_A_GPU, Entry, entries, run, samples

import ullage

QUICK = 80  # every eightieth entry, one sample each
PARTS = 32


def judged(entry, most):
    """What became of each sample: "as on the CPU", "left out", "different", "not on the CPU", or what went wrong."""
    if entry.name in LEFT_OUT:
        return ["left out"]
    verdicts = []
    with ullage.virtual_gpu("H200"):
        for place, sample in samples(entry, most):
            verdicts.append(_verdict(entry, place, sample))
    return verdicts


def _verdict(entry, place, sample):
    here = _outcome(entry, sample, "cuda")
    there = _outcome(entry, sample, "cpu")
    if isinstance(here, Exception):
        if NOT_ON_A_GPU in str(here):
            return "not on a GPU"
        both = isinstance(there, Exception)
        return f"not on the CPU: {here!r}"[:200] if both else f"{entry} {place}: {type(here).__name__}: {here}"[:400]
    if isinstance(there, Exception):
        return "not on the CPU"
    if here[:2] == there[:2]:
        return "as on the CPU"
    return "different" if entry.name in DIFFERENT else f"{entry} {place}: {there[:2]} there, {here[:2]} here"


def _outcome(entry, sample, device):
    try:
        return run(entry, sample, device)
    except Exception as error:
        return error


def wrong(verdicts):
    return [verdict for verdict in verdicts if verdict.startswith("Entry")]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.slow  # reading the lists takes longer than all that is done with them
def test_every_eightieth_entry_of_the_lists():
    found = [verdict for entry in entries()[::QUICK] for verdict in judged(entry, 1)]
    assert not wrong(found)
    assert found.count("as on the CPU") > 15, collections.Counter(found)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_sample_of_the_lists(part):
    found = [verdict for entry in entries()[part::PARTS] for verdict in judged(entry, None)]
    print(collections.Counter(found))
    assert not wrong(found)


@pytest.mark.slow
def test_exceptions_are_in_the_lists():
    names = {entry.name for entry in entries()}
    assert set(LEFT_OUT) | set(DIFFERENT) <= names
    assert isinstance(next(iter(entries())), Entry)
