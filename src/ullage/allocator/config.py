"""The allocator's settings: `PYTORCH_ALLOC_CONF`, parsed and checked the way PyTorch does it."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from ullage.allocator.blocks import LARGE_BUFFER, MIN_LARGE_ALLOC, ROUNDUP_INTERVALS, UNLIMITED
from ullage.units import MIB

ENVIRONMENT_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

# Options of PyTorch without an effect on device memory: pinned host memory, locks, CUDA graphs.
OPTIONS_WITHOUT_EFFECT = (
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "pinned_free_catch_all",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
)

NO_ROUNDUP = (0,) * ROUNDUP_INTERVALS


class AllocatorConfigError(ValueError):
    """Raised for a setting that PyTorch would refuse, or that this model does not cover."""


@dataclass(frozen=True)
class AllocatorConfig:
    """The settings of PYTORCH_ALLOC_CONF that concern device memory. Sizes are bytes; defaults are PyTorch's.

    ``garbage_collection_threshold`` acts only together with a ``memory_fraction`` below 1, as in PyTorch
    (2.9 and later). ``roundup_power2_divisions`` is the table over powers of two from 1 MiB on: entry ``i``
    holds for requests from ``2**i`` MiB to the next power, the first also for all below; 0 and 1 mean none.
    """

    max_split_size: int = UNLIMITED
    roundup_power2_divisions: tuple[int, ...] = NO_ROUNDUP
    expandable_segments: bool = False
    garbage_collection_threshold: float = 0.0
    max_non_split_rounding: int = LARGE_BUFFER
    memory_fraction: float = 1.0
    large_segment_size: int = LARGE_BUFFER

    def __post_init__(self) -> None:
        if (count := len(self.roundup_power2_divisions)) != ROUNDUP_INTERVALS:
            raise AllocatorConfigError(f"roundup_power2_divisions must have {ROUNDUP_INTERVALS} entries, got {count}")
        for divisions in self.roundup_power2_divisions:
            _check_power_of_two("roundup_power2_divisions", divisions, zero=True)
        if not 0.0 <= self.garbage_collection_threshold < 1.0:
            raise AllocatorConfigError(
                f"garbage_collection_threshold must be between 0 and 1, got {self.garbage_collection_threshold:g}"
            )
        if not 0.0 <= self.memory_fraction <= 1.0:
            raise AllocatorConfigError(f"per_process_memory_fraction must be from 0 to 1, got {self.memory_fraction:g}")
        if self.large_segment_size <= MIN_LARGE_ALLOC:
            raise AllocatorConfigError(
                f"large_segment_size_mb must be more than {MIN_LARGE_ALLOC // MIB}, "
                f"got {self.large_segment_size / MIB:g}"
            )
        for name, size in (
            ("max_split_size_mb", self.max_split_size),
            ("max_non_split_rounding_mb", self.max_non_split_rounding),
        ):
            if size < self.large_segment_size:
                raise AllocatorConfigError(
                    f"{name} must be at least {self.large_segment_size // MIB}, got {size / MIB:g}"
                )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the value of PYTORCH_ALLOC_CONF.

        Options without an effect on device memory are accepted and ignored; ``backend:cudaMallocAsync``
        (another allocator) and unknown words are refused.
        """
        values: dict[str, Any] = {}
        for name, value in _pairs(text):
            if name in _OPTIONS:
                attribute, read = _OPTIONS[name]
                values[attribute] = read(name, value)
            elif name == "backend" and value != "native":
                raise AllocatorConfigError(f"backend must be native, the allocator modelled here, got {value}")
            elif name not in OPTIONS_WITHOUT_EFFECT and name != "backend":
                raise AllocatorConfigError(f"an option must be one that PyTorch knows, got {name!r}")
        values.setdefault("max_non_split_rounding", values.get("large_segment_size", LARGE_BUFFER))
        return cls(**values)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        environment = os.environ if environment is None else environment
        for name in ENVIRONMENT_NAMES:
            if name in environment:
                return cls.parse(environment[name])
        return cls()


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Split ``key:value,key:[a:1,b:2]`` at the commas outside brackets."""
    compact = re.sub(r"\s", "", text)
    for item in re.findall(r"[^,\[\]]*\[[^\]]*\]?|[^,]+", compact):
        name, colon, value = item.partition(":")
        if not colon or not value:
            raise AllocatorConfigError(f"an option must have the form name:value, got {item!r}")
        yield name, value


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise AllocatorConfigError(f"{name} must be a whole number, got {text!r}")
    return int(text)


def _size(name: str, text: str) -> int:
    return min(_whole(name, text) * MIB, UNLIMITED)


def _real(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise AllocatorConfigError(f"{name} must be a number, got {text!r}") from None


def _threshold(name: str, text: str) -> float:
    if (threshold := _real(name, text)) <= 0.0:
        raise AllocatorConfigError(f"{name} must be between 0 and 1, got {threshold:g}")
    return threshold


def _flag(name: str, text: str) -> bool:
    if text not in ("True", "False"):
        raise AllocatorConfigError(f"{name} must be True or False, got {text!r}")
    return text == "True"


def _check_power_of_two(name: str, value: int, *, zero: bool = False) -> None:
    if value < 0 or value & (value - 1) or (value == 0 and not zero):
        raise AllocatorConfigError(f"{name} must have powers of two, got {value}")


def _divisions(name: str, text: str) -> tuple[int, ...]:
    """Fill the table from ``8`` or from ``[256:1,512:2,>:4]``, where 256 stands for 256 MiB."""
    if not text.startswith("["):
        divisions = _whole(name, text)
        _check_power_of_two(name, divisions)
        return (divisions,) * ROUNDUP_INTERVALS
    if not text.endswith("]"):
        raise AllocatorConfigError(f"{name} must have a closing bracket, got {text!r}")
    table = list(NO_ROUNDUP)
    last: int | None = None
    for boundary_text, value_text in _pairs(text[1:-1]):
        value = _whole(name, value_text)
        _check_power_of_two(name, value, zero=True)
        if boundary_text == ">":
            # PyTorch keeps the interval before ">" as it was given; before 2.9 it was overwritten.
            start = 1 if last is None else last + 1
            table[start:] = [value] * len(table[start:])
            continue
        boundary = _whole(name, boundary_text)
        _check_power_of_two(name, boundary)
        index = min(boundary.bit_length() - 1, ROUNDUP_INTERVALS - 1)
        if last is None:
            table[:index] = [value] * index
        table[index] = value
        last = index
    return tuple(table)


# By option: the attribute of `AllocatorConfig`, and the function that reads its value.
_OPTIONS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "max_split_size_mb": ("max_split_size", _size),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "expandable_segments": ("expandable_segments", _flag),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _size),
    "per_process_memory_fraction": ("memory_fraction", _real),
    "large_segment_size_mb": ("large_segment_size", _size),
}
