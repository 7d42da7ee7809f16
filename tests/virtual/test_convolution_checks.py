"""Convolutions of shapes that do not go together fail as PyTorch's do."""

import pytest
import torch
from torch import nn

from ullage.virtual import virtual_gpu


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(3, 5, 1), (2, 4, 8, 8)),
        (nn.Conv2d(4, 8, 3, groups=2), (2, 3, 8, 8)),
        (nn.Conv2d(3, 5, 7), (2, 3, 4, 4)),
        (nn.Conv1d(3, 5, 3, dilation=4), (2, 3, 8)),
        (nn.ConvTranspose2d(3, 5, 3), (2, 4, 8, 8)),
    ],
)
def test_the_message_is_that_of_the_cpu(layer, shape):
    with pytest.raises(RuntimeError) as on_the_cpu:
        layer(torch.zeros(shape))
    with virtual_gpu("H200"), pytest.raises(RuntimeError) as on_the_gpu:
        layer.cuda()(torch.zeros(shape, device="cuda"))
    assert str(on_the_gpu.value) == str(on_the_cpu.value)
