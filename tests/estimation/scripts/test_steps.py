"""The usual step of a script, and what its DataLoader tells about samples."""

import pytest

from ullage.estimation.scripts.request import unpacked

LOADER = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    model = torch.nn.Linear(16, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.zeros(100, 16))
    for epoch in range(20):
        for count, (x,) in enumerate(DataLoader(data, batch_size=8, shuffle=True), 1):
            model(x.cuda()).sum().backward()
            if count % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_short_last_batch_is_not_the_usual_step(follow, accumulate):
    answer = follow(LOADER.replace("ACCUMULATE", str(accumulate)))
    step = unpacked(answer["calls"])
    assert step["steady"] and step["optimizer_steps"] == 1
    assert step["samples"] == 8 * accumulate and not step["largest"]
    assert answer["estimate"]["epoch_samples"] == 100


def test_periodic_work_is_no_part_of_the_usual_step(follow):
    step = unpacked(
        follow(
            """
            import torch
            model = torch.nn.Linear(16, 4).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(30):
                loss = model(torch.zeros(8, 16, device="cuda")).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step % 10 == 0:
                    print(loss.item())
            """
        )["calls"]
    )
    assert step["steady"] and step["optimizer_steps"] == 1
    assert "aten._local_scalar_dense.default" not in [call["operator"] for call in step["calls"]]


def test_with_varying_lengths_the_step_is_of_the_largest_batch(follow):
    varied = LOADER.replace("ACCUMULATE", "1").replace("batch_size=8", "batch_size=1")
    lengths = "[(torch.zeros(1 + n % 50, 16),) for n in range(100)]"
    answer = follow(varied.replace("TensorDataset(torch.zeros(100, 16))", lengths))
    step = unpacked(answer["calls"])
    sizes = [call["args"][0]["shape"] for call in step["calls"] if call["operator"] == "aten._to_copy.default"]
    assert step["largest"] and sizes == [[1, 50, 16]]


def test_validation_is_no_part_of_the_usual_step(follow):
    """The second step waits for the first, so no two steps are alike before epochs are cut short to see validation."""
    validated = (
        LOADER.replace("ACCUMULATE", "1")
        + """
            if epoch == 0 and count == 1:
                torch.cuda.synchronize()
        with torch.no_grad():
            for (x,) in DataLoader(data, batch_size=8):
                model(x.cuda())
"""
    )
    step = unpacked(follow(validated)["calls"])
    assert step["samples"] == 8 and step["optimizer_steps"] == 1


def test_validation_is_no_part_of_an_epoch(follow):
    validated = LOADER.replace("ACCUMULATE", "1").replace(
        "for count, ",
        "for (x,) in DataLoader(TensorDataset(torch.zeros(64, 16)), 4): model(x.cuda())\n        for count, ",
    )
    assert follow(validated)["estimate"]["epoch_samples"] == 100


def test_a_stream_has_no_length(follow):
    streamed = LOADER.replace("ACCUMULATE", "1").replace("shuffle=True", "shuffle=False")
    stream = (
        """type("S", (torch.utils.data.IterableDataset,), {"__iter__": lambda s: iter([(torch.zeros(16),)] * 99)})()"""
    )
    answer = follow(streamed.replace("TensorDataset(torch.zeros(100, 16))", stream))
    assert unpacked(answer["calls"])["samples"] == 8 and answer["estimate"]["epoch_samples"] is None
