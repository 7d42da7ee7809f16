"""Lightning counts the batches of an epoch itself: told that an epoch has one batch, it goes on to its validation."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from ullage.virtual.replacements import Replacements

if TYPE_CHECKING:
    from ullage.estimate.script_loaders import Loaders

_LOOPS = ("lightning.pytorch.loops.training_epoch_loop", "pytorch_lightning.loops.training_epoch_loop")


def install(loaders: Loaders, replacements: Replacements) -> None:
    """Let epochs end early after training has settled, in either name of the package."""
    for name in _LOOPS:
        replacements.when_imported(name, lambda module: _shorten(module, loaders, replacements))


def _shorten(module: ModuleType, loaders: Loaders, replacements: Replacements) -> None:
    loop: Any = getattr(module, "_TrainingEpochLoop", None)
    if loop is None:
        return
    advance = loop.advance

    def advance_in_a_hurry(self: Any, *args: Any, **options: Any) -> Any:
        loaders.end_training_epochs = False
        if loaders.hurry:
            self.trainer.fit_loop.max_batches = 1
            self.trainer.val_check_batch = 1
        return advance(self, *args, **options)

    replacements.put(loop, "advance", advance_in_a_hurry)
