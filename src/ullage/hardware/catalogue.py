"""Read `GPU` records from TOML: from the catalogue's own file, or from a file that describes a custom card."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, UnknownName
from ullage.hardware.specification import GPU, generation_of
from ullage.units import KIB, MIB, parse_bytes

Table = Mapping[str, Any]

_SIZES = ("memory", "usable", "context", "context_bare", "context_upper")
_WHOLE = ("sms", "shared_memory_per_sm_kib", "max_threads_per_sm")
_RATES = ("bandwidth", "power_w", "fp32_tflops", "tf32_tflops", "fp16_tflops", "bf16_tflops", "l2_mib")
_TEXTS = ("device_name", "family", "source", "usable_source", "context_source")
_SCALED_BY_SMS = ("power_w", "fp32_tflops", "tf32_tflops", "fp16_tflops", "bf16_tflops")
_KEYS = sorted(
    [*_SIZES, *(f"{size}_mib" for size in _SIZES), *_WHOLE, *_RATES, *_TEXTS]
    + ["name", "compute_capability", "context_measured", "aliases"]
)
# A representative card of each architecture.
ARCHITECTURE_CARDS = {
    "sm_75": "T4",
    "sm_80": "A100-40GB",
    "sm_86": "RTX-3090",
    "sm_89": "RTX-4090",
    "sm_90": "H200",
    "sm_100": "B200",
    "sm_120": "RTX-5090",
}


@cache
def catalogue_tables() -> dict[str, Any]:
    """Return the catalogue's file: the tables `generation`, `capability`, `gpu` and `mig`, and the list `context`."""
    return tomllib.loads(files("ullage.hardware").joinpath("catalogue.toml").read_text(encoding="utf-8"))


@cache
def read_catalogue() -> dict[str, GPU]:
    """Return every GPU of the catalogue by name, each card followed by its MIG instances. Do not change the result.

    >>> list(read_catalogue())[:2]
    ['P100-16GB', 'P40']
    """
    tables, cards = catalogue_tables(), {}
    for name, table in tables["gpu"].items():
        cards[name] = gpu_from_table(name, table, f"catalogue.toml, {name}")
        mig = tables["mig"].get(name, {"profiles": []})
        for row in mig["profiles"]:
            instance = _mig_instance(cards[name], row, mig["slices"], mig["source"])
            cards[instance.name] = instance
    return cards


def gpus() -> tuple[GPU, ...]:
    """Return every GPU of the catalogue, MIG instances after their card.

    >>> len([card for card in gpus() if not card.is_mig]) >= 45
    True
    """
    return tuple(read_catalogue().values())


def gpu_from_table(name: str, table: Table, where: str, base: GPU | None = None) -> GPU:
    """Return a GPU from the keys of a table. Missing keys come from `base`, or else from its generation.

    `where` names the file in an error's text.

    >>> gpu_from_table("X", {"memory": "24GiB", "compute_capability": "8.6"}, "x.toml").max_threads_per_sm
    1536
    """
    given = _checked(table, where)
    if base is not None:
        return _inherited(name, given, base, where)
    for key in ("memory", "compute_capability"):
        if key not in given:
            raise InvalidValue(f"{where} has neither {key} nor base = the name of a GPU")
    capability = given["compute_capability"]
    common = {"device_name": name, "source": where, **defaults(capability)}
    sms, threads = given.get("sms"), given.get("max_threads_per_sm", common.get("max_threads_per_sm"))
    if sms and threads and generation_of(capability):
        common |= _context(sms, threads, capability)
    return GPU(name=name, **_with_usable(common | given))


def bare_context(sms: int, threads: int) -> int:
    """Return the bytes of an unused context: local memory for all threads that the card can hold."""
    return sms * threads * 2 * KIB


def _context(sms: int, threads: int, capability: tuple[int, int]) -> dict[str, Any]:
    generation = generation_of(capability)
    code = catalogue_tables()["generation"][generation]
    bare, used = bare_context(sms, threads), code["context_code_mib"]
    return {
        "context_bare": bare,
        "context": bare + used * MIB,
        "context_upper": bare + code["context_code_upper_mib"] * MIB,
        "context_source": f"not measured on this card: {sms} SMs x {threads} threads x 2 KiB, as on six cards with "
        f"published figures, and {used} MiB of code for {generation}",
    }


def defaults(compute_capability: tuple[int, int]) -> dict[str, Any]:
    """Return the common properties of all GPUs of a compute capability, as fields of `GPU`."""
    tables = catalogue_tables()
    generation = tables["generation"].get(generation_of(compute_capability), {})
    known = {key: value for key, value in generation.items() if not key.startswith(("reserved", "context_code"))}
    known |= tables["capability"].get("{}.{}".format(*compute_capability), {})
    return _checked(known, "catalogue.toml")


def derived_usable(memory: int, compute_capability: tuple[int, int] | None) -> tuple[int, str]:
    """Return the part of `memory` that the driver leaves usable, by shares fitted to cards with published figures
    (within 1%), and a description of the computation."""
    generation = generation_of(compute_capability) if compute_capability else None
    # An unknown generation gets Ampere's share, a large one: too little usable memory is the safer error.
    share = catalogue_tables()["generation"][generation or "ampere"]
    reserved = share["reserved_mib"] * MIB + int(share["reserved_fraction"] * memory)
    usable = max(memory - reserved, 0) // KIB * KIB
    return usable, f"derived: memory less the driver's share on {generation or 'ampere'}"


def read_own_gpu(path: Path, named: Callable[[str], GPU]) -> GPU:
    """Read a GPU from a TOML file; `base = "A100-40GB"` starts from a GPU of the catalogue.

    `named` finds that card. Every mistake in the file is one `InvalidValue` that names the file and the key.

    >>> import tempfile; card = Path(tempfile.mkdtemp(), "mycard.toml")
    >>> _ = card.write_text('base = "A100-40GB"\\nmemory = "20GiB"')
    >>> read_own_gpu(card, read_catalogue().__getitem__).name
    'mycard'
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InvalidValue(f"{path} must be a TOML file that describes a GPU: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidValue(f"{path} must be valid TOML: {error}") from None
    base, start = table.pop("base", None), None
    if not isinstance(base, str | None):
        raise InvalidValue(f"{path}: base must be the name of a GPU, got {base!r}")
    try:
        start = None if base is None else named(base)
    except UnknownName as error:
        raise InvalidValue(f"{path}: base: {error}") from None
    name = _value("name", table.get("name", path.stem), str(path))
    return gpu_from_table(name, table, str(path), start)


def _inherited(name: str, given: dict[str, Any], base: GPU, where: str) -> GPU:
    known = {field.name: getattr(base, field.name) for field in fields(base)}
    if given.get("compute_capability", base.compute_capability) != base.compute_capability:
        known |= defaults(given["compute_capability"])
    if "memory" in given or "usable" in given:
        # If the file changes only the memory, the usable part changes with it.
        del known["usable"], known["usable_source"]
    if "context" in given:
        known |= dict.fromkeys(("context_bare", "context_upper")) | {"context_measured": False}
        known["context_source"] = where
    known |= {"source": f"{where}, from {base.name}: {base.source}", "aliases": ()} | given | {"name": name}
    return GPU(**_with_usable(known))


def _with_usable(known: dict[str, Any]) -> dict[str, Any]:
    if "usable" not in known:
        usable, reckoned = derived_usable(known["memory"], known.get("compute_capability"))
        return {**known, "usable": usable, "usable_source": reckoned}
    memory, usable = known["memory"], known["usable"]
    if usable > memory:
        raise InvalidValue(f"{known['source']}: usable must be at most memory ({memory}), got {usable}")
    return {"usable_source": known["source"], **known}


def _mig_instance(card: GPU, row: Table, slices: int, source: str) -> GPU:
    assert card.sms is not None, "cards with MIG instances say how many SMs they have"
    of_memory, of_sms = row["memory_slices"] / slices, row["sms"] / card.sms
    scaled: dict[str, Any] = {key: _times(getattr(card, key), of_sms) for key in _SCALED_BY_SMS}
    scaled |= {key: _times(getattr(card, key), of_memory) for key in ("bandwidth", "l2_mib")}
    scaled |= {"l2_mib": row["l2_mib"]} if "l2_mib" in row else {}
    return replace(
        card,
        name=f"{card.name}-MIG-{row['profile']}",
        device_name=f"{card.device_name} MIG {row['profile']}",
        memory=row["memory_mib"] * MIB,
        usable=row["memory_mib"] * MIB,
        usable_source="the instance's memory",
        sms=row["sms"],
        context_measured=False,
        context_source=f"as on the whole {card.name}",
        parent=card.name,
        mig_instances=row["instances"],
        aliases=(),
        source=f"{source}; rates in proportion to {card.name}",
        **scaled,
    )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else round(value * factor, 2)


def _checked(table: Table, where: str) -> dict[str, Any]:
    """Return the table's keys as fields of `GPU`, or raise one error with the wrong key and what it needs."""
    known: dict[str, Any] = {}
    for key, value in table.items():
        field = key.removesuffix("_mib") if key.removesuffix("_mib") in _SIZES else key
        if key not in _KEYS:
            raise InvalidValue(f"{where}: unknown key {key!r}; known keys: base, {', '.join(_KEYS)}")
        if field in known:
            raise InvalidValue(f"{where}: {field} is given twice, as {field} and as {field}_mib")
        if key != "name":
            known[field] = _value(key, value, where)
    return known


def _value(key: str, value: Any, where: str) -> Any:
    def wrong(needed: str) -> InvalidValue:
        return InvalidValue(f"{where}: {key} must be {needed}, got {value!r}")

    if key in _SIZES:
        try:
            size = parse_bytes(value) if type(value) in (int, str) else None
        except InvalidValue:
            size = None
        if size is None or size <= 0:
            raise wrong("bytes or a size such as '24GiB'" if size is None else "a size above 0")
        return size
    if key.removesuffix("_mib") in _SIZES or key in _WHOLE:
        if type(value) is not int or value <= 0:
            raise wrong("a whole number above 0")
        return value * MIB if key.endswith("_mib") else value
    if key in _RATES:
        if type(value) not in (int, float) or value <= 0:
            raise wrong("a number above 0")
        return float(value)
    if key == "context_measured":
        if not isinstance(value, bool):
            raise wrong("true or false")
        return value
    if key == "compute_capability":
        major, dot, minor = value.partition(".") if isinstance(value, str) else ("", "", "")
        if not (dot and major.isdecimal() and minor.isdecimal()):
            raise wrong("text such as '8.6'")
        return int(major), int(minor)
    if key == "aliases":
        if not isinstance(value, list) or not all(isinstance(alias, str) for alias in value):
            raise wrong("a list of texts")
        return tuple(value)
    if not isinstance(value, str) or not value:
        raise wrong("text")
    return value
