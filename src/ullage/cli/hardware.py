"""`ullage gpus`: the catalogue of GPUs, and the details of one."""

import json
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ullage.cli import completion
from ullage.cli.options import Json, argument
from ullage.cli.tables import fitted
from ullage.errors import InvalidValue, UnknownName
from ullage.hardware import GPU, gpu, own_gpus
from ullage.hardware import gpus as all_gpus
from ullage.units import format_bytes

_GIVE_WAY = ("measured", "BF16", "SMs", "FP16", "FP32")  # columns to drop in a narrow terminal, in this order
_WORDS = {
    "device_name": "name in PyTorch",
    "memory": "memory (nvidia-smi)",
    "usable": "usable by PyTorch",
    "usable_source": "",
    "compute_capability": "compute capability",
    "generation": "generation",
    "sms": "SMs",
    "max_threads_per_sm": "threads per SM",
    "shared_memory_per_sm_kib": "shared memory per SM, KiB",
    "l2_mib": "L2 cache, MiB",
    "bandwidth": "bandwidth, GB/s",
    "power_w": "power, W",
    "fp32_tflops": "FP32, TFLOPS",
    "tf32_tflops": "TF32, TFLOPS",
    "fp16_tflops": "FP16, TFLOPS",
    "bf16_tflops": "BF16, TFLOPS",
    "context": "CUDA context",
    "context_upper": "CUDA context at most",
    "context_measured": "measured",
    "context_source": "",
    "parent": "slice of",
    "mig_instances": "instances per GPU",
    "aliases": "also called",
    "source": "source",
}
_SIZES = ("memory", "usable", "context", "context_upper")
_MIG_ONLY = ("parent", "mig_instances")


def gpus(
    word: Annotated[str, argument("Full name, part of a name, or generation.", "NAME", completion.gpus)] = "",
    as_json: Json = False,
) -> None:
    """List the GPUs that Ullage knows, or show one in detail.

    To add a GPU, put a TOML file into $ULLAGE_HOME/gpus, or pass its path.

    Examples:

      ullage gpus A100
      ullage gpus local
    """
    one = _one(word)
    cards = [*all_gpus(), *own_gpus()]
    part = word.strip().casefold()
    listed = [one] if one else [card for card in cards if part in card.name.casefold() or part == card.generation]
    if not listed:
        raise InvalidValue(f"no GPU has {word!r} in its name; 'ullage gpus' lists them all")
    if as_json:
        print(json.dumps([vars(card) for card in listed], default=str))
        return
    if one:
        Console().print(_details(one))
    else:
        print(_table(listed))


def _one(word: str) -> GPU | None:
    """Return the GPU with a full name; `None` for a part of a name."""
    if not word:
        return None
    exact = word.strip().endswith(".toml") or word.strip().casefold().startswith("local")
    try:
        card = gpu(word)
    except UnknownName:
        return None
    return card if exact or card.name.casefold() == word.strip().casefold() else None


def _table(cards: list[GPU]) -> str:
    heads = ("GPU", "memory", "usable", "SMs", "GB/s", "FP32", "FP16", "BF16", "CC", "context", "measured")
    rows = []
    for card in cards:
        capability = ".".join(str(part) for part in card.compute_capability or ("?", "?"))
        rates = [_number(value) for value in (card.bandwidth, card.fp32_tflops, card.fp16_tflops, card.bf16_tflops)]
        sizes = [format_bytes(size) for size in (card.memory, card.usable, card.context)]
        measured = "yes" if card.context_measured else "no"
        rows.append([card.name, *sizes[:2], _number(card.sms), *rates, capability, sizes[2], measured])
    return fitted(heads, rows, give_way=_GIVE_WAY, left=("measured",)) + "\nrates in TFLOPS, dense; CC: capability"


def _details(card: GPU) -> Table:
    table = Table(show_header=False, title=card.name, title_justify="left", title_style="bold")
    for name, words in _WORDS.items():
        value = getattr(card, name)
        if name in _MIG_ONLY and value is None or name == "aliases" and not value:
            continue
        table.add_row(Text(words, style="dim"), Text(_text_of(name, value)))
    return table


def _text_of(name: str, value: Any) -> str:
    if name in _SIZES:
        return format_bytes(value) if value is None else f"{format_bytes(value)} ({value:,} bytes)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "compute_capability" and value is not None:
        return ".".join(map(str, value))
    if isinstance(value, tuple):
        return ", ".join(value)
    return _number(value) if isinstance(value, int | float) else str(value or "unknown")


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.6g}" if value < 1000 else f"{value:,.0f}"
