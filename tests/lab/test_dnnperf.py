"""DNNPerf: the computation graph, the node-edge encoder, training, and the shipped weights."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from ullage.cli.main import app
from ullage.errors import InvalidValue
from ullage.estimation.estimators.registry import find
from ullage.hardware import gpu
from ullage.jobs import Model
from ullage.jobs.job import JobRequest
from ullage_lab.estimators import dnnperf as estimator
from ullage_lab.estimators.dnnperf import (
    KINDS,
    GraphNetwork,
    NodeEdgeEncoder,
    NodeFeatures,
    StepGraph,
    folded,
    graph_of,
    joined,
    tensors_of,
)
from ullage_lab.train import dnnperf as training

NAMES = list(KINDS)


def mlp(**options: object) -> Model:
    return Model.from_row({"model": "mlp:x", "widths": [64, 128, 10], "batch": 32, "opt": "adam"} | options)


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return graph_of(mlp())


def test_graph_sizes_and_arithmetic_equal_a_count_by_hand(graph: StepGraph) -> None:
    weights = (64 * 128 + 128 + 128 * 10 + 10) * 4
    assert (graph.parameters, graph.gradients) == (weights, weights)
    assert 2 * weights <= graph.state <= 2 * weights + 64  # two moments, and step counters where they are on the GPU
    products = [node for node in graph.nodes if NAMES[node.kind] == "matrix product"]
    assert [node.flops for node in products if not node.backward] == [2 * 32 * 64 * 128, 2 * 32 * 128 * 10]
    assert sum(node.flops for node in products if node.backward) == 2 * 32 * (64 * 128 + 2 * 128 * 10)
    assert products[0].outputs >= 32 * 128 * 4 and products[0].weights == (64 * 128 + 128) * 4


def test_edges_go_forward_and_carry_sizes(graph: StepGraph) -> None:
    assert all(source < target < len(graph.nodes) for source, target, _, _ in graph.edges)
    assert any(size == 32 * 128 * 4 for _, _, size, _ in graph.edges)


def test_autocast_is_in_the_graph() -> None:
    wide, narrow = (graph_of(mlp(precision=precision)) for precision in ("fp32", "amp_bf16"))
    assert {width for _, _, _, width in wide.edges} == {4, 8} and 2 in {width for _, _, _, width in narrow.edges}


def test_a_convolution_has_its_hyperparameters() -> None:
    pytest.importorskip("torchvision")
    made = graph_of(Model("tv:squeezenet1_1", batch_size=2, input_shape=[3, 64, 64], optimizer="sgd"))
    first = next(node for node in made.nodes if NAMES[node.kind] == "convolution")
    assert (first.kernel, first.stride, first.groups) == (9, 4, 1)
    assert first.flops == 2 * 2 * 64 * 31 * 31 * 3 * 9


def test_attention_weighs_only_what_arrives_at_a_node() -> None:
    torch.manual_seed(0)
    encode = NodeEdgeEncoder(8)
    ends = torch.tensor([[0, 1], [2, 2]])
    nodes, edges = torch.randn(4, 8), torch.randn(2, 8)
    before, _ = encode(nodes, edges, ends)
    nodes[3] += 1.0  # no edge leaves it
    after, _ = encode(nodes, edges, ends)
    assert torch.equal(before[:3], after[:3]) and not torch.equal(before[3], after[3])
    nodes[0] += 1.0
    assert not torch.equal(encode(nodes, edges, ends)[0][2], after[2])


def test_folding_equal_nodes_changes_no_answer() -> None:
    torch.manual_seed(0)
    whole = tensors_of(graph_of(mlp(widths=[64] * 12)))
    small, network = folded(whole), GraphNetwork()
    assert len(small.kinds) < len(whole.kinds) / 2 and small.counts.sum() == len(whole.kinds)
    torch.testing.assert_close(network(small), network(whole))


def test_uncorrected_memory_grows_with_live_memory() -> None:
    torch.manual_seed(0)
    network = GraphNetwork()
    torch.nn.init.zeros_(network.correction[2].weight)
    small = network(
        tensors_of(StepGraph([NodeFeatures(0), NodeFeatures(2, outputs=2**20)], [(0, 1, 512, 4)], parameters=2**20))
    )
    large = network(
        tensors_of(StepGraph([NodeFeatures(0), NodeFeatures(2, outputs=2**30)], [(0, 1, 512, 4)], parameters=2**30))
    )
    assert large[0, 0] > small[0, 0]


def test_graphs_side_by_side_do_not_touch_each_other() -> None:
    torch.manual_seed(0)
    one, other = (folded(tensors_of(graph_of(mlp(batch=batch)))) for batch in (8, 512))
    network = GraphNetwork()
    torch.testing.assert_close(network(joined([one, other])), torch.cat([network(one), network(other)]))


def write_runs(path: Path, models: list[str]) -> Path:
    rows = [
        {"model": model, "widths": [64, 64 * 2**number, 10], "batch": 32, "peak_reserved": 2**28, "step_s": 0.01}
        for number, model in enumerate(models)
    ]
    unmeasured = rows[0] | {"peak_reserved": None}
    with gzip.open(path, "wt") as file:
        file.write("\n".join(json.dumps(row) for row in [*rows, unmeasured]))
    return path


def test_training_learns_and_is_repeatable(tmp_path: Path) -> None:
    found = training.samples(write_runs(tmp_path / "runs.jsonl.gz", ["mlp:x"] * 4))
    assert len(found) == 4
    before = training.figures(training.ratios(training.fit(found, epochs=0), found))
    after = training.figures(training.ratios(training.fit(found, epochs=80), found))
    assert after["memory_median_error"] < before["memory_median_error"] / 4
    assert after["time_median_error"] < before["time_median_error"] / 4
    one, again = (training.fit(found, epochs=2) for _ in range(2))
    assert all(torch.equal(left, right) for left, right in zip(one.parameters(), again.parameters(), strict=True))


def train(data: Path, out: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["lab", "train", "dnnperf", "--data", str(data), "--out", str(out), *options])


def test_the_train_command_writes_what_the_estimator_reads(tmp_path: Path) -> None:
    data, out = write_runs(tmp_path / "runs.jsonl.gz", ["mlp:x", "mlp:y", "mlp:z"]), tmp_path / "weights"
    printed = json.loads(train(data, out, "--epochs", "1", "--folds", "3").stdout)
    assert (printed["held_out"]["runs"], printed["held_out"]["families"]) == (3, 3)
    network, card = estimator.network(out)
    assert card == printed and isinstance(network, GraphNetwork)


def test_the_train_command_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    failed = train(tmp_path / "empty.jsonl", tmp_path / "w").exception
    assert isinstance(failed, InvalidValue) and "peak_reserved" in str(failed)
    one_family = write_runs(tmp_path / "one.jsonl.gz", ["mlp:x"])
    failed = train(one_family, tmp_path / "w").exception
    assert isinstance(failed, InvalidValue) and "model families and folds must be two or more, got 1 " in str(failed)


def test_the_shipped_weights_answer_with_what_they_know() -> None:
    answer = find("dnnperf").estimate(JobRequest(mlp(widths=[1024, 4096, 10])), gpu("A100-40GB"))
    assert answer.figure_kind == "reserved" and answer.figure == answer.peak_reserved
    assert answer.process_memory is None
    text = " ".join(answer.notes)
    assert "not of A100-40GB" in text and "other processes used the GPU" in text and "median error" in text
    assert estimator.WEIGHTS.stat().st_size < 2**20


def test_weights_that_are_not_there_are_one_message(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="cannot read the weights of dnnperf"):
        estimator.network(tmp_path / "none.safetensors")
