"""Lists of convolutions to measure: what they hold, and that they can be read back."""

from collections import Counter

from ullage.research.cudnn_tables import collect
from ullage.research.cudnn_tables.collect import arbitrary_configurations
from ullage.research.cudnn_tables.tasks import TYPES, operations, read_tasks, tensor_bytes


def test_arbitrary_layers_alone_can_be_listed_without_any_model(tmp_path, capsys):
    out = tmp_path / "odd.json.gz"
    collect.main(["--out", str(out), "--seconds", "0", "--configurations", "0", "--random", "0", "--arbitrary", "300"])
    layers, tasks = read_tasks(out)
    assert len(tasks) == 2 * 300  # each forward and backward
    assert {task.layer for task in tasks} == set(range(len(layers)))
    assert "600 tasks" in capsys.readouterr().out


def test_most_arbitrary_channel_counts_are_not_multiples_of_eight():
    rows = list(arbitrary_configurations(2000))
    odd = sum(layer.input[0] % 8 > 0 or layer.weight[0] % 8 > 0 for layer, *_ in rows)
    assert odd > 0.8 * len(rows)
    assert {layer.weight[-1] for layer, *_ in rows} >= {1, 3, 5, 7}
    assert len(Counter(batch for _, batch, *_ in rows)) > 60


def test_arbitrary_calls_stay_small_enough_to_measure_quickly():
    rows = list(arbitrary_configurations(2000))
    assert all(min(layer.output()) > 0 for layer, *_ in rows)
    assert max(tensor_bytes(layer, batch, TYPES[kind]) for layer, batch, kind, _ in rows) <= 1_200_000_000
    assert sum(operations(layer, batch) for layer, batch, *_ in rows) / len(rows) < 20e9


def test_any_beginning_of_the_list_is_the_same_list():
    assert list(arbitrary_configurations(50)) == list(arbitrary_configurations(80))[:50]
