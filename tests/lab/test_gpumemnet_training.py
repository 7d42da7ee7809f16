"""The published networks learn, stop in time, and are judged on the same rows whatever their classes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.lab.synthetic import rows

from ullage.errors import InvalidValue
from ullage.estimation.estimators.weights import ModelCard
from ullage_lab.train.fitting import Schedule, fit
from ullage_lab.train.protocol import Examples, examples_of, train

CARD = ModelCard(family="mlp", estimator="mlp", bin=1 << 30, bins=8)
SHORT = Schedule(epochs=3, batch=32, rate=1e-3, patience=30)


@pytest.fixture(scope="module")
def examples() -> Examples:
    return examples_of(rows(240))


@pytest.mark.slow
def test_training_learns() -> None:
    """Of what the published method can see: 16 bytes a parameter."""
    told = [row | {"process_memory": (1 << 29) + 16 * row["parameters"]} for row in rows(240)]
    examples = examples_of(told)
    result = train(
        examples,
        family="mlp",
        estimator="mlp",
        bin=1 << 30,
        validate=False,
        schedule=Schedule(epochs=150, batch=32, rate=3e-3, patience=30),
    )
    most = np.bincount(np.ceil(examples.memory[result.test_rows] / 2**30).astype(int)).max() / len(result.test_rows)
    assert result.test.accuracy >= most + 0.2 and result.validation == []


def test_the_test_part_is_the_same_whatever_the_width(examples: Examples) -> None:
    parts = []
    for width in (1, 8):
        trained = train(examples, family="mlp", estimator="mlp", bin=width << 30, schedule=SHORT)
        parts.append(trained.card.test)
        assert trained.card.test == parts[0] and len(trained.validation) == 3
        assert trained.card.bins == max(2, int(np.ceil(examples.memory.max() / (width << 30))))


def test_equal_seeds_give_equal_weights(examples: Examples) -> None:
    jobs, memory = examples.part(np.arange(60))
    for estimator in ("mlp", "transformer"):
        made = [fit(replace(CARD, estimator=estimator), jobs, memory, SHORT, seed) for seed in (1, 1, 2)]
        weights = [torch.cat([weight.flatten() for weight in network.parameters()]) for network in made]
        assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_training_stops_when_the_loss_no_longer_falls(examples: Examples) -> None:
    heard: list[str] = []
    jobs, memory = examples.part(np.arange(100))
    fit(CARD, jobs, memory, Schedule(epochs=500, batch=32, rate=0.05, patience=3), 1, heard.append)
    losses = [float(text.split()[-1]) for text in heard]
    assert 4 <= len(heard) < 500 and min(losses) <= losses[-4] and losses[-1] >= min(losses)


def test_rows_of_two_families_are_refused() -> None:
    with pytest.raises(InvalidValue, match="rows must be of one family, got cnn, mlp"):
        examples_of([*rows(3), *rows(3, family="cnn")])
