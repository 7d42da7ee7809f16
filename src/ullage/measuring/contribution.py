"""A file of small training runs that a user measured, for `ullage contribute` and `ullage evaluate`.

The file is JSON lines. The first describes the card and the versions, each other one training of a fixed list. Apart
from the card's name it has only numbers and versions. Each value is checked against a pattern on writing and on
reading: files come from strangers, so everything not allowed is refused, with its line.
"""

import importlib.metadata
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.errors import UPDATE, InvalidValue
from ullage.hardware import GPU
from ullage.hardware.catalogue import gpu_from_table
from ullage.hardware.local import in_catalogue
from ullage.text import plain
from ullage.units import MIB

FORMAT, VERSION = "ullage-contribution", 1
MOST_BYTES, MOST_LINES, LONGEST_LINE = 1 << 20, 200, 1 << 16
PACKAGES = ("ullage", "torch", "torchvision", "timm", "transformers", "numpy")


def _image(model: str, batch: int, size: int, **settings: Any) -> dict[str, Any]:
    return {"model": model, "batch": batch, "input": [3, size, size], "opt": "sgdm", "precision": "fp32"} | settings


def _text(model: str, batch: int, length: int, **settings: Any) -> dict[str, Any]:
    return {"model": model, "batch": batch, "seq": length, "opt": "adamw", "precision": "fp32"} | settings


# The trainings of version 1, the most informative first, in case a run is cut short. None needs 8 GB.
TRAININGS: dict[str, dict[str, Any]] = {
    "mlp": {"model": "mlp:x", "widths": [784, 2048, 2048, 10], "batch": 256, "opt": "adam", "precision": "fp32"},
    "mlp-bf16": {"model": "mlp:x", "widths": [784, 2048, 10], "batch": 256, "opt": "adamw", "precision": "bf16"},
    "resnet18": _image("torchvision:resnet18", 32, 224),
    "gpt2": _text("hf:GPT2LMHeadModel", 2, 256, attn="sdpa"),
    "gpt2-amp-fp16": _text("hf:GPT2LMHeadModel", 2, 256, attn="sdpa", precision="amp_fp16"),
    "resnet18-amp-fp16-last": _image("torchvision:resnet18", 32, 224, precision="amp_fp16", channels_last=True),
    "bert-eager": _text("hf:BertForMaskedLM", 4, 128, attn="eager"),
    "gpt2-amp-bf16": _text("hf:GPT2LMHeadModel", 2, 256, attn="sdpa", precision="amp_bf16"),
    "bert-efficient": _text("hf:BertForMaskedLM", 4, 128, attn="efficient"),
    "bert-math": _text("hf:BertForMaskedLM", 4, 128, attn="math"),
    "resnet50": _image("torchvision:resnet50", 16, 224),
    "vgg11": _image("torchvision:vgg11", 8, 224),
    "mobilenet": _image("torchvision:mobilenet_v3_small", 32, 224),
    "mobilenet-amp-fp16": _image("torchvision:mobilenet_v3_small", 32, 224, precision="amp_fp16"),
    "densenet121": _image("torchvision:densenet121", 8, 224),
    "efficientnet-last": _image("torchvision:efficientnet_b0", 16, 224, channels_last=True),
    "resnet18-bf16": _image("torchvision:resnet18", 32, 224, precision="bf16"),
    "squeezenet-odd": _image("torchvision:squeezenet1_1", 13, 199),
    "convnext": _image("torchvision:convnext_tiny", 8, 224, precision="amp_fp16"),
    "unet-like": _image("torchvision:deeplabv3_mobilenet_v3_large", 4, 224),
    "vit": _image("timm:vit_small_patch16_224", 16, 224, opt="adamw"),
    "vit-amp-fp16": _image("timm:vit_small_patch16_224", 16, 224, opt="adamw", precision="amp_fp16"),
    "t5": _text("hf:T5ForConditionalGeneration", 2, 128),
    "gpt2-checkpoint": _text("hf:GPT2LMHeadModel", 2, 256, attn="sdpa", ckpt=True),
    "gpt2-long": _text("hf:GPT2LMHeadModel", 1, 1024, attn="sdpa", precision="amp_fp16"),
}

_SIZES = ("peak_alloc", "peak_reserved", "end_alloc", "end_reserved")
_OPTIONAL_SIZES = ("nvml_ctx", "nvml_end")
_COUNTS = {"retries": 10**6, "segments": 10**6}
OUT_OF_MEMORY, NOT_INSTALLED, FAILED = "out of memory", "not installed", "failed"
_VERSION = re.compile(
    r"[0-9]{1,5}(\.[0-9]{1,5}){0,3}((a|b|rc|\.dev|\.post)[0-9]{1,8})?(\+(cpu|cu[0-9]{2,4}|git[0-9a-f]{4,40}))?"
)
_GPU_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ()./+-]{1,63}")
_MOST_MEMORY = 1 << 40


class BadContribution(InvalidValue):
    """A file that is not a contribution, or has impossible values."""


@dataclass(frozen=True)
class Contribution:
    """A checked file: its header, and the trainings that were done, by id."""

    header: dict[str, Any]
    runs: dict[str, dict[str, Any]]

    @property
    def gpu(self) -> GPU:
        """The card: the catalogue's if it has one of this name and size, else as the file describes it."""
        card = self.header["gpu"]
        table = {"memory": card["memory"], "sms": card["sms"], "compute_capability": card["capability"]}
        known = in_catalogue(card["name"], card["memory"])
        return known or gpu_from_table(card["name"], table, "the contribution")

    def truth(self) -> list[dict[str, Any]]:
        """Return the measured trainings, in the form of a file of measured runs."""
        measured = [name for name, run in self.runs.items() if "failed" not in run]
        return [{"id": name, **TRAININGS[name], **self.runs[name]} for name in measured]


def header_of(gpu: GPU, driver: str | None, cuda: str | None, cudnn: int | None) -> dict[str, Any]:
    """Return the first line: the card and the software, without anything that identifies the machine."""
    versions = {}
    for package in PACKAGES:
        try:
            release = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        for version in (release, release.partition("+")[0]):  # a custom build may carry a name
            if _VERSION.fullmatch(version):
                versions[package] = version
                break
    capability = gpu.told_capability
    card = {
        "name": re.sub(r"[^A-Za-z0-9 ()./+-]", " ", gpu.device_name)[:64],
        "memory": gpu.memory,
        "capability": f"{capability[0]}.{capability[1]}",
        "sms": gpu.sms or 1,
    }
    header = {"format": FORMAT, "version": VERSION, "gpu": card, "versions": versions}
    for name, value in (("driver", driver), ("cuda", cuda)):
        if value is not None and _VERSION.fullmatch(value):
            header[name] = value
    return header | ({"cudnn": cudnn} if cudnn is not None else {})


def line_of(name: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return a training's line: only the figures. An error's text may name paths, so one word replaces it."""
    if "oom" in measured:
        return {"id": name, "failed": OUT_OF_MEMORY}
    if "failed" in measured:
        missing = "No module named" in str(measured["failed"]) or "pip install" in str(measured["failed"])
        return {"id": name, "failed": NOT_INSTALLED if missing else FAILED}
    line: dict[str, Any] = {"id": name} | {key: int(measured[key]) for key in (*_SIZES, *_COUNTS)}
    line |= {key: int(measured[key]) for key in _OPTIONAL_SIZES if measured.get(key) is not None}
    return line | {"step_s": round(float(measured.get("step_s") or 0.0), 6)}


def contribute(
    path: Path,
    header: dict[str, Any],
    measure_one: Callable[[dict[str, Any], float], dict[str, Any]],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure the trainings that the file lacks, until the time is over; yield each training's id and line.

    `measure_one` takes a configuration and the seconds that are left. Each line is on the disk before the next training
    begins; after a kill, the same call goes on. A file of another card or other versions is left as it is.
    """
    done = _begin(path, header)
    end = clock() + seconds
    with path.open("a", encoding="utf-8") as file:
        for name, row in TRAININGS.items():
            left = end - clock()
            if name in done or left <= 0:
                continue
            line = line_of(name, measure_one({"id": name, **row}, left))
            if line.get("failed") == FAILED and end - clock() <= 0:
                return  # it may have been stopped by the time alone
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
            yield name, line


def _begin(path: Path, header: dict[str, Any]) -> set[str]:
    """Return the ids in the file. A new file gets its header; a last line cut off by a kill is removed."""
    if not path.exists() or not path.stat().st_size:
        path.write_text(json.dumps(header) + "\n", encoding="utf-8")
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    contents = check(whole, str(path))
    if contents.header != header:
        different = [key for key in header if contents.header.get(key) != header[key]]
        raise InvalidValue(
            f"{path} is from another machine or other versions ({', '.join(different) or 'cudnn'} differ); "
            "name a new file with --out"
        )
    if whole != content:
        os.truncate(path, len(whole))
    return set(contents.runs)


# Checking: whatever is not listed is refused.


def is_one(path: Path) -> bool:
    """Return whether a file begins as `ullage contribute` begins its files."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline())
    except (OSError, ValueError):
        return False
    return isinstance(header, dict) and header.get("format") == FORMAT


def read(path: Path) -> Contribution:
    """Read and check a file; `BadContribution` says which line is wrong, and why."""
    try:
        size = path.stat().st_size
        if not path.is_file() or size > MOST_BYTES:
            raise BadContribution(f"{path} must be a file of at most {MOST_BYTES} bytes, got {size}")
        content = path.read_bytes()
    except OSError as error:
        raise BadContribution(f"{path} must be a file that 'ullage contribute' wrote: {error.strerror}") from None
    return check(content, str(path))


def check(content: bytes, where: str = "the contribution") -> Contribution:
    lines = content.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    if not lines or len(lines) > MOST_LINES:
        raise BadContribution(f"{where} must have 1 to {MOST_LINES} lines, got {len(lines)}")
    header = _header(_object(lines[0], f"{where}, line 1"), f"{where}, line 1")
    runs: dict[str, dict[str, Any]] = {}
    for number, text in enumerate(lines[1:], start=2):
        place = f"{where}, line {number}"
        run = _object(text, place)
        name = run.pop("id", None)
        if not isinstance(name, str) or name not in TRAININGS:
            raise BadContribution(f"{place}: id must be that of a training of version {VERSION}, got {_shown(name)}")
        if name in runs:
            raise BadContribution(f"{place}: {name} is there twice")
        runs[name] = _run(run, header["gpu"]["memory"], place)
    return Contribution(header, runs)


def _object(text: bytes, place: str) -> dict[str, Any]:
    def refuse(word: str) -> Any:
        raise BadContribution(f"{place}: numbers must be finite, got {word}")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in items}) != len(items):
            raise BadContribution(f"{place}: a key is there twice")
        return dict(items)

    if len(text) > LONGEST_LINE:
        raise BadContribution(f"{place} must have at most {LONGEST_LINE} bytes, got {len(text)}")
    try:
        value = json.loads(text.decode("utf-8"), parse_constant=refuse, object_pairs_hook=pairs)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError, ValueError) as error:
        if isinstance(error, BadContribution):
            raise
        raise BadContribution(f"{place} must be a JSON object") from None
    if not isinstance(value, dict):
        raise BadContribution(f"{place} must be a JSON object")
    return value


def _header(header: dict[str, Any], place: str) -> dict[str, Any]:
    if header.get("format") != FORMAT:
        raise BadContribution(f"{place}: format must be {FORMAT}")
    if header.get("version") != VERSION:
        raise BadContribution(
            f"{place}: version must be {VERSION}, got {_shown(header.get('version'))}. To update, type: {UPDATE}"
        )
    _only(header, {"format", "version", "gpu", "versions"}, {"driver", "cuda", "cudnn"}, place)
    card, versions = header["gpu"], header["versions"]
    if not isinstance(card, dict) or not isinstance(versions, dict):
        raise BadContribution(f"{place}: gpu and versions must be objects")
    _only(card, {"name", "memory", "capability", "sms"}, set(), place)
    _only(versions, {"torch"}, set(PACKAGES), place)
    _matches(card["name"], _GPU_NAME, "gpu.name", place)
    _matches(card["capability"], re.compile(r"[0-9]{1,2}\.[0-9]"), "gpu.capability", place)
    numbered = {name: header[name] for name in ("driver", "cuda") if name in header}
    for name, version in (numbered | {f"versions.{name}": version for name, version in versions.items()}).items():
        _matches(version, _VERSION, name, place)
    _whole(header.get("cudnn", 0), 0, 10**7, "cudnn", place)
    _whole(card["memory"], 256 * MIB, _MOST_MEMORY, "gpu.memory", place)
    _whole(card["sms"], 1, 10_000, "gpu.sms", place)
    return header


def _run(run: dict[str, Any], memory: int, place: str) -> dict[str, Any]:
    if "failed" in run:
        _only(run, {"failed"}, set(), place)
        if run["failed"] not in (OUT_OF_MEMORY, NOT_INSTALLED, FAILED):
            raise BadContribution(f"{place}: failed must be {OUT_OF_MEMORY}, {NOT_INSTALLED} or {FAILED}")
        return run
    _only(run, {*_SIZES, *_COUNTS, "step_s"}, set(_OPTIONAL_SIZES), place)
    for name in (*_SIZES, *(size for size in _OPTIONAL_SIZES if size in run)):
        _whole(run[name], 0, memory, name, place)
    for name, most in _COUNTS.items():
        _whole(run[name], 0, most, name, place)
    if isinstance(run["step_s"], bool) or not isinstance(run["step_s"], int | float) or not 0 <= run["step_s"] < 3600:
        raise BadContribution(f"{place}: step_s must be seconds below an hour, got {_shown(run['step_s'])}")
    _plausible(run, place)
    return run


def _plausible(run: dict[str, Any], place: str) -> None:
    """Refuse figures that no GPU can have: PyTorch's allocator hands out multiples of 512 bytes from whole segments."""
    end, peak = (run["end_alloc"], run["end_reserved"]), (run["peak_alloc"], run["peak_reserved"])
    wrong = [
        (not run["peak_alloc"], "nothing was allocated"),
        (peak[0] % 512 or end[0] % 512, "allocated memory is a multiple of 512 bytes"),
        (peak[1] % (2 * MIB) or end[1] % (2 * MIB), "reserved memory comes in steps of 2 MiB"),
        (peak[0] > peak[1], "more is allocated than reserved"),
        (end[0] > peak[0] or end[1] > peak[1], "an end lies above its peak"),
        (run.get("nvml_end", _MOST_MEMORY) < run["end_reserved"], "NVML saw less than PyTorch reserved"),
        (run.get("nvml_ctx", 0) > 4096 * MIB, "no context is that large"),
    ]
    for bad, why in wrong:
        if bad:
            raise BadContribution(f"{place}: cannot be: {why}")


def _only(value: dict[str, Any], needed: set[str], allowed: set[str], place: str) -> None:
    missing, unknown = needed - value.keys(), value.keys() - needed - allowed
    if missing:
        raise BadContribution(f"{place} has no {', '.join(sorted(missing))}")
    if unknown:
        raise BadContribution(f"{place}: unknown key {_shown(min(unknown))}")


def _matches(value: Any, pattern: re.Pattern[str], name: str, place: str) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise BadContribution(f"{place}: {name} is invalid: {_shown(value)}")


def _whole(value: Any, least: int, most: int, name: str, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadContribution(f"{place}: {name} must be a whole number from {least} to {most}, got {_shown(value)}")


def _shown(value: Any) -> str:
    """Shorten a value of a stranger's file for a message, without characters that control a terminal."""
    return plain(repr(value))[:60]
