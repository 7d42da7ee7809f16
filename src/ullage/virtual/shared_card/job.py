"""Install a virtual card in a whole process, from the import of PyTorch to the end of the process.

`CUDA_VISIBLE_DEVICES` decides which cards the process sees. It uses the first of them, or the one of its rank.
"""

import atexit
import os
import sys

import torch

from ullage.errors import UllageError
from ullage.hardware import gpu as find_gpu
from ullage.virtual.call.replacements import Replacements
from ullage.virtual.gpu import VirtualGPU, follow_allocator_settings
from ullage.virtual.shared_card.cards import VARIABLE, Cards
from ullage.virtual.shared_card.process import SharedCard
from ullage.virtual.torch_cuda.safetensors import install_safetensors


def install() -> VirtualGPU | None:
    """Make the virtual card this process's "cuda"; return `None` if the process sees no card. A card that cannot be
    used ends the process with one message and exit code 1: a job must not train without it."""
    try:
        cards = Cards.open(os.environ[VARIABLE]).visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
        if not cards:
            return None
        rank = int(os.environ.get("LOCAL_RANK", 0))
        card = cards[rank if rank < len(cards) else 0]
        gpu = VirtualGPU(find_gpu(card.name), shared=SharedCard(card))
        gpu.__enter__()
    except UllageError as error:
        print(f"ullage: this process cannot use its virtual card: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    replacements = Replacements()  # never undone
    install_safetensors(replacements)
    follow_allocator_settings(gpu)
    os.register_at_fork(after_in_child=lambda: _forked(gpu, gpu.shared))
    atexit.register(_end, gpu)
    return gpu


def _forked(gpu: VirtualGPU, shared: SharedCard | None) -> None:
    """Close the card in the child of a process that uses CUDA: inherited memory is not its own."""
    if shared is None or not shared.is_of_parent:
        return
    gpu.memory.closed = True
    gpu.memory.before_request = shared.refuse_if_forked
    torch.cuda._initialized = False
    torch.cuda._is_in_bad_fork = lambda: True


def _end(gpu: VirtualGPU) -> None:
    """Ignore frees while the interpreter shuts down: the end of the process returns its memory."""
    gpu.memory.closed = True
