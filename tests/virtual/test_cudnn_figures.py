"""The program that fits cuDNN's workspaces finds the shipped figures again, from calls and a file with wrong ones."""

import random
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from ullage.virtual.operators.recurrent_kernels import GRU, TANH, RecurrentNetwork

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "training"))

import cudnn_figures as program  # noqa: E402


def shipped(kind):
    return tomllib.loads(program.shipped(kind).read_text())


def networks(count):
    """Large networks of one direction, as they might be measured."""
    chance = random.Random(5)
    for _ in range(count):
        steps, batch = chance.randint(2, 120), chance.randint(1, 128)
        yield RecurrentNetwork(
            mode=chance.choice([TANH, GRU]),
            inputs=chance.randint(1, 1024),
            hidden=chance.randint(400, 1024),
            projected=0,
            layers=chance.randint(1, 4),
            directions=1,
            dtype=chance.choice([torch.float32, torch.float16, torch.bfloat16]),
            steps=steps,
            batch=batch,
            tokens=steps * batch,
            dropout=chance.random() < 0.3,
            train=chance.random() < 0.8,
        )


def test_counts_and_windows_are_found_again():
    """Sizes are those of the shipped figures: the program has to come back to them from other ones."""
    real = shipped("recurrent")
    calls = [program.RecurrentCall(network, False, network.workspace()) for network in networks(400)]
    start = shipped("recurrent")
    for row in start["buffers"]:
        for side in ("forward", "backward"):
            row[side] = {name: [1] for name in row[side]}
    start["window"][2]["each"] = 16
    found = program.fit_recurrent(calls, start)
    assert sum(program.exact_recurrent(call, start) for call in calls) < 0.1 * len(calls)
    assert sum(program.exact_recurrent(call, found) for call in calls) >= 0.98 * len(calls)
    assert [(step["first"], step["each"]) for step in found["window"]][-3:] == [(8, 8), (8, 4), (8, 2)]
    rows = {row["words"]: row for row in found["buffers"]}
    for row in real["buffers"]:
        if row["words"] in ("plain padded one large", "gru padded one large"):
            counts = {name: sum(parts) for name, parts in row["backward"].items()}
            assert {name: sum(parts) for name, parts in rows[row["words"]]["backward"].items()} == counts


def test_tiles_of_batch_normalization_are_found_again():
    """From every seventh of the measured calls, and a file with other tiles."""
    real = shipped("normalization")
    calls = program.norm_calls(ROOT / "benchmarks" / "data" / "batch_norm_h200.jsonl.gz")[::7]
    start = real | {"width": 8, "odd_width": 128, "narrow_width": 32}
    start |= {side: dict.fromkeys(real[side], 32) for side in ("forward", "backward")}
    found = program.fit_normalization(calls, start)
    assert found == real
    assert not any(program.exact_normalization(call, start) for call in calls)


@pytest.mark.parametrize("kind", ["recurrent", "normalization"])
def test_a_written_file_says_the_same_and_how_it_was_made(kind):
    figures = shipped(kind)
    text = program.as_toml(kind, figures, "python benchmarks/training/cudnn_figures.py")
    assert tomllib.loads(text) == figures
    assert "`python benchmarks/training/cudnn_figures.py`" in text
