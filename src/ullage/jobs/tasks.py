"""Training tasks of models: a batch of random inputs and targets, the forward pass, and the usual loss.

A task creates its batch on the CPU as a pair (inputs, targets). The training loop moves both to the GPU, one after the
other, as most loops do. `forward` and `loss` are separate because the memory that a loop holds between them counts.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ullage.errors import InvalidValue
from ullage.virtual.gpu import current


def assume(text: str) -> None:
    """Add an assumption to the notes of the current virtual GPU; on a real GPU this does nothing."""
    card = current()
    if card is not None and text not in card.notes:  # once only, since each iteration assumes the same
        card.note("default", text)


AUXILIARY_WEIGHT = 0.4  # weight of the second classifier of Inception-like networks
SEGMENTATION_AUXILIARY_WEIGHT = 0.5  # torchvision, references/segmentation/train.py
BOXES_AN_IMAGE = 8


class Task:
    """Image classification, and the base of the other tasks."""

    def __init__(self, shape: list[int], classes: int) -> None:
        self.shape, self.classes = shape, classes

    def batch(self, size: int) -> tuple[Any, Any]:
        return torch.randn(size, *self.shape), torch.randint(0, self.classes, (size,))

    def forward(self, model: nn.Module, inputs: Any, targets: Any) -> Any:
        """Return the output that the loop holds through the backward pass."""
        return model(inputs)

    def loss(self, out: Any, targets: Any) -> torch.Tensor:
        """Return the cross entropy, including that of the second classifier of Inception-like networks."""
        if not hasattr(out, "logits"):
            return functional.cross_entropy(out, targets)
        loss = functional.cross_entropy(out.logits, targets)
        auxiliary = getattr(out, "aux_logits", None)
        return loss if auxiliary is None else loss + AUXILIARY_WEIGHT * functional.cross_entropy(auxiliary, targets)

    def predict(self, model: nn.Module, inputs: Any, targets: Any) -> Any:
        return model(inputs)


class Segmentation(Task):
    """A class for every pixel, for torchvision's segmentation models."""

    def batch(self, size: int) -> tuple[Any, Any]:
        return torch.randn(size, *self.shape), torch.randint(0, self.classes, (size, *self.shape[-2:]))

    def loss(self, out: Any, targets: Any) -> torch.Tensor:
        """Return the cross entropy over pixels, including that of an auxiliary classifier."""
        loss = functional.cross_entropy(out["out"], targets)
        if "aux" in out:
            loss = loss + SEGMENTATION_AUXILIARY_WEIGHT * functional.cross_entropy(out["aux"], targets)
        return loss


class Detection(Task):
    """Detection of boxes by torchvision's models, which take a list of images and a list of dictionaries."""

    def batch(self, size: int) -> tuple[Any, Any]:
        """Return images of one size with a few boxes each, and masks and key points for models that train on them."""
        assume(
            f"each image has {BOXES_AN_IMAGE} boxes; the number of detections depends on data: the maximum is assumed"
        )
        height, width = self.shape[-2:]
        return [torch.rand(*self.shape) for _ in range(size)], [self._target(height, width) for _ in range(size)]

    def _target(self, height: int, width: int) -> dict[str, torch.Tensor]:
        corner = torch.rand(BOXES_AN_IMAGE, 2) * torch.tensor([width / 2, height / 2])
        size = torch.tensor([width / 4, height / 4])
        return {
            "boxes": torch.cat([corner, corner + size], dim=1),
            "labels": torch.randint(1, self.classes, (BOXES_AN_IMAGE,)),
            "masks": torch.zeros(BOXES_AN_IMAGE, height, width, dtype=torch.uint8),
            "keypoints": torch.ones(BOXES_AN_IMAGE, 17, 3),  # the 17 points of COCO
        }

    def forward(self, model: nn.Module, inputs: Any, targets: Any) -> Any:
        return sum(model(inputs, targets).values())

    def loss(self, out: Any, targets: Any) -> torch.Tensor:
        loss: torch.Tensor = out
        return loss


class OwnTask(Task):
    """A model of your own: the shape of its output decides the loss."""

    def __init__(self, shape: list[int] | None, length: int | None, vocabulary: int | None) -> None:
        super().__init__(shape or [], 0)
        self.length, self.vocabulary = length, vocabulary

    def batch(self, size: int) -> tuple[Any, Any]:
        """Return random numbers of the given shape, or random ids of the given length."""
        if self.length is None:
            return torch.randn(size, *self.shape), None
        ids = torch.randint(0, self.vocabulary or 1, (size, self.length))
        return ids, ids

    def loss(self, returned: Any, targets: Any) -> torch.Tensor:
        """Return the model's own loss if it has one, else cross entropy over classes or mean squared error."""
        out = _main_output(returned)
        if out.dim() == 0:
            return out
        if self.length is not None and out.dim() == 3 and out.shape[1] == self.length:
            assume("loss: cross entropy over the vocabulary at every position")
            return functional.cross_entropy(out.flatten(0, 1), targets.flatten())
        if out.dim() >= 2 and out.shape[1] > 1:
            assume("loss: cross entropy over the output's second dimension")
            shape = (out.shape[0], *out.shape[2:])
            return functional.cross_entropy(out, torch.zeros(shape, dtype=torch.int64, device=out.device))
        assume("loss: mean squared error, as the output has no classes")
        return functional.mse_loss(out, torch.zeros_like(out))


def _main_output(out: Any) -> torch.Tensor:
    """Return the tensor to compute a loss from: the loss, the logits, or else the first output."""
    for name in ("loss", "logits", "out"):
        value = out.get(name) if isinstance(out, dict) else getattr(out, name, None)
        if isinstance(value, torch.Tensor):
            return value
    if isinstance(out, dict):
        out = list(out.values())
    while isinstance(out, list | tuple) and out:
        out = out[0]
    if isinstance(out, torch.Tensor) and (out.is_floating_point() or out.is_complex()):
        return out
    raise InvalidValue(
        "the model's output must be a tensor of numbers, or a dictionary or tuple with one, to compute a loss from, "
        f"got {type(out).__name__}. Write a training function and estimate that: ullage.estimate(train, gpu=...)"
    )
