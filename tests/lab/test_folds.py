"""Parts of the data never overlap, and nothing is carried over from one fold to the next."""

import numpy as np
import pytest
import torch
from tests.lab.synthetic import rows

from ullage.errors import InvalidValue
from ullage.estimation.estimators.weights import ModelCard
from ullage_lab.train import protocol
from ullage_lab.train.fitting import Schedule, fit
from ullage_lab.train.folds import folds, held_out, key_of, strata
from ullage_lab.train.protocol import Examples, examples_of

SHORT = Schedule(epochs=3, batch=32)


@pytest.fixture(scope="module")
def examples() -> Examples:
    return examples_of(rows(90))


def test_test_part_and_folds_share_no_row_and_cover_all() -> None:
    classes = [0] * 60 + [1] * 30 + [2] * 9 + [3]
    learn, test = held_out(classes, seed=3)
    assert not set(learn) & set(test) and len(learn) + len(test) == 100 and len(test) == 30
    seen: list[int] = []
    for fit_on, validate in folds(classes, learn, seed=3):
        assert not set(fit_on) & set(validate) and not (set(fit_on) | set(validate)) & set(test)
        seen += validate.tolist()
    assert sorted(seen) == learn.tolist()


def test_classes_have_the_same_share_in_every_part() -> None:
    classes = np.array([0] * 600 + [1] * 300 + [2] * 100)
    learn, test = held_out(classes.tolist(), seed=1)
    for part in (learn, test, *(validate for _, validate in folds(classes.tolist(), learn, seed=1))):
        assert np.bincount(classes[part]) / len(part) == pytest.approx([0.6, 0.3, 0.1], abs=0.01)


def test_a_seed_gives_the_same_parts_and_another_seed_others() -> None:
    classes = [0] * 60 + [1] * 40
    assert held_out(classes, 1)[1].tolist() == held_out(classes, 1)[1].tolist() != held_out(classes, 2)[1].tolist()


def test_rare_classes_are_joined() -> None:
    assert strata([5, 7, 7, 7, 9], least=2).tolist() == [0, 0, 0, 0, 0]
    assert strata([5, 7, 7, 7, 9, 9], least=2).tolist() == [0, 0, 0, 0, 1, 1]


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(InvalidValue, match="need at least 12 rows"):
        held_out([0] * 5, seed=1)


def test_a_key_is_that_of_the_configuration_and_the_gpu() -> None:
    one = {"id": "a", "configuration": "{}", "gpu": "H200"}
    assert key_of(one) == key_of(one | {"id": "b"}) != key_of(one | {"gpu": "A100-40GB"})


@pytest.mark.slow
def test_every_fold_begins_with_a_new_network(examples: Examples, monkeypatch) -> None:
    """A canary: what one fold learned would show in the next one's weights and statistics."""
    seen = []

    def watched(card, jobs, memory, schedule, seed, notify=None):
        network = fit(card, jobs, memory, schedule, seed, notify)
        alone = fit(card, jobs, memory, schedule, seed)
        seen.append((network, alone, jobs))
        with torch.no_grad():  # poison: a network that is carried over takes this along
            for weight in network.parameters():
                weight.fill_(float("nan"))
        return alone

    monkeypatch.setattr(protocol, "fit", watched)
    result = protocol.train(examples, family="mlp", estimator="mlp", bin=1 << 30, schedule=SHORT)
    assert len(seen) == 4 and len({id(network) for network, _, _ in seen}) == 4
    assert all(weight.isfinite().all() for _, alone, _ in seen for weight in alone.parameters())
    assert result.test.rows == 27


def test_the_test_part_changes_no_weight(examples: Examples) -> None:
    first = protocol.train(examples, family="mlp", estimator="mlp", bin=1 << 30, schedule=SHORT)
    changed = Examples(examples.rows, examples.jobs, examples.memory.copy(), examples.keys)
    changed.memory[first.test_rows] *= 1.001  # within the same bins: the same parts
    second = protocol.train(changed, family="mlp", estimator="mlp", bin=1 << 30, schedule=SHORT)
    assert first.test_rows.tolist() == second.test_rows.tolist()
    for one, other in zip(first.network.parameters(), second.network.parameters(), strict=True):
        assert torch.equal(one, other)


def test_equal_seeds_give_equal_weights(examples: Examples) -> None:
    card = ModelCard(family="mlp", estimator="transformer", bin=1 << 30, bins=16)
    jobs, memory = examples.part(np.arange(60))
    made = [fit(card, jobs, memory, SHORT, seed) for seed in (1, 1, 2)]
    weights = [torch.cat([weight.flatten() for weight in network.parameters()]) for network in made]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
