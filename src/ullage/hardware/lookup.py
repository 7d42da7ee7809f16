"""GPU lookup by name, by a custom file, as "local" for this machine's GPU, or several at once."""

import itertools
import re
from functools import cache
from pathlib import Path

from ullage.errors import InvalidValue, UnknownName, nearest
from ullage.hardware.catalogue import gpus, read_catalogue, read_own_gpu
from ullage.hardware.local import local_gpus
from ullage.hardware.specification import GPU
from ullage.home import home

_MAKERS = re.compile(r"^(nvidia|geforce|tesla)+")
_MODEL_LINE = re.compile(r"rtx|gtx")
_FORM = re.compile(r"pcie|nvl|sxm[0-9]?")
_MEMORY = re.compile(r"[0-9]+gb")
_NOTHING = re.compile("")
_LOCAL = re.compile(r"local(?::([0-9]+))?", re.IGNORECASE)
_COUNT_AND_NAME = re.compile(r"(?:([0-9]+)\s*[x×*]\s*)?(.+)")


def gpu(name: str | Path | GPU) -> GPU:
    """Find a GPU by name; case, hyphens, underscores and spaces do not matter. A path reads a TOML file.

    A short name is enough if only one GPU has it (`"4090"`, `"gh200"`), and so does what PyTorch
    prints (`"NVIDIA A100-SXM4-40GB"`). A name that fits several ("a100") raises `UnknownName` with them all.
    A path that ends in `.toml` describes your own card: `base = "A100-40GB"` and the keys that differ, for
    example `memory = "20GiB"`; files in `$ULLAGE_HOME/gpus` are found by their names without `.toml`. `"local"` is
    the first GPU of this machine, `"local:1"` the second. A `GPU` is returned as it is.

    >>> gpu("rtx_4090").name, gpu("4090").name, gpu("NVIDIA H200").name
    ('RTX-4090', 'RTX-4090', 'H200')
    """
    if isinstance(name, GPU):
        return name
    if not isinstance(name, str | Path):
        raise InvalidValue(f"a GPU must be a name or the path of a TOML file, got {name!r}")
    if isinstance(name, Path) or name.strip().endswith(".toml"):
        return read_own_gpu(Path(str(name).strip()), _named)
    local = _LOCAL.fullmatch(name.strip())
    if local is not None:
        index, here = int(local[1] or 0), local_gpus()
        if index < len(here):
            return here[index]
        raise InvalidValue(
            f"this machine has no GPU {index}; NVML finds {len(here) or 'none'}. "
            "Give a name instead ('ullage gpus' lists them), or type: pip install nvidia-ml-py"
        )
    own = own_files().get(name.strip().casefold())
    return read_own_gpu(own, _named) if own is not None else _named(name)


def default_gpu() -> str:
    """Return the default GPU: "local" if NVML finds one, else "H200".

    >>> default_gpu() in ("local", "H200")
    True
    """
    return "local" if local_gpus() else "H200"


def default_gpu_note(taken: str) -> str:
    """Return the note about a GPU that was used by default.

    >>> default_gpu_note("H200")
    'the GPU defaults to H200; name another with --gpu NAME'
    """
    return f"the GPU defaults to {taken}; name another with --gpu NAME"


def own_files() -> dict[str, Path]:
    """Return the files in `$ULLAGE_HOME/gpus`, by their names in lower case."""
    try:
        return {path.stem.casefold(): path for path in sorted((home() / "gpus").glob("*.toml"))}
    except PermissionError:  # the home of another user, taken from their job's variables
        return {}


def own_gpus() -> tuple[GPU, ...]:
    """Return the GPUs that the files in `$ULLAGE_HOME/gpus` describe. A mistake in a file raises `InvalidValue`."""
    return tuple(read_own_gpu(path, _named) for path in own_files().values())


def select_gpus(text: str) -> list[GPU]:
    """Return GPUs to compare: `"all"` (without MIG instances), `"mig"`, a generation, or names separated by commas."""
    word = text.strip().casefold()
    whole = [card for card in gpus() if not card.is_mig]
    if word == "all":
        return [*whole, *own_gpus()]
    if word == "mig":
        return [card for card in gpus() if card.is_mig]
    if word in {card.generation for card in whole}:
        return [card for card in whole if card.generation == word]
    return list({card.name: card for card in map(gpu, text.split(","))}.values())


def gpu_list(text: str) -> list[GPU]:
    """Return several GPUs, in order: `"4xA100-40GB"`, `"2x4090, H200"`, or a single name."""
    cards: list[GPU] = []
    for part in text.split(","):
        match = _COUNT_AND_NAME.fullmatch(part.strip())
        if match is None or match[1] is not None and int(match[1]) == 0:
            raise InvalidValue(f"GPUs must look like 4xA100-40GB or 2xH200,T4, got {text!r}")
        cards += [gpu(match[2])] * int(match[1] or 1)
    return cards


def _named(name: str) -> GPU:
    exact = _exact_names().get(_folded(name))
    meant = [exact] if exact else _short_names().get(_folded(name), [])
    if len(meant) == 1:
        return read_catalogue()[meant[0]]
    if meant:
        raise UnknownName("GPU", name, meant, hint=f"{name} can be any of {', '.join(meant)}")
    # MIG instances of one card would leave no room for other cards among the suggestions.
    wants_mig = "mig" in name.casefold()
    known = [card.name for card in gpus() if wants_mig or not card.is_mig]
    short = [card for way in nearest(_folded(name), _short_names()) for card in _short_names()[way] if card in known]
    raise UnknownName("GPU", name, known, listed_by="ullage gpus", near=list(dict.fromkeys(short))[:3])


@cache
def _exact_names() -> dict[str, str]:
    aliases = {_folded(alias): card.name for card in gpus() for alias in card.aliases}
    return aliases | {_folded(name): name for name in read_catalogue()}


@cache
def _short_names() -> dict[str, list[str]]:
    """Return every other way to write a name, with the GPUs that it can mean."""
    meanings: dict[str, list[str]] = {}
    for card in read_catalogue().values():
        for short in sorted(_ways_to_write(card)):
            meanings.setdefault(short, []).append(card.name)
    return meanings


def _ways_to_write(card: GPU) -> set[str]:
    ways = {_folded(way) for way in (card.device_name, *card.aliases)}
    if card.parent is not None:
        profile = card.name.removeprefix(f"{card.parent}-MIG-")
        stems = {card.parent, "-".join(_words(card.parent, _MEMORY))}
        return ways | {_folded(stem + mig + profile) for stem in stems for mig in ("", "mig")}
    for written in (card.name, *card.aliases):
        for left_out in itertools.product((_NOTHING, _FORM), (_NOTHING, _MEMORY), (_NOTHING, _MODEL_LINE)):
            ways.add("".join(_words(written, *left_out)))
    return ways


def _words(name: str, *left_out: re.Pattern[str]) -> list[str]:
    return [word for word in name.casefold().split("-") if not any(pattern.fullmatch(word) for pattern in left_out)]


def _folded(name: str) -> str:
    letters = re.sub(r"[^a-z0-9]", "", name.casefold())
    return _MAKERS.sub("", letters) or letters
