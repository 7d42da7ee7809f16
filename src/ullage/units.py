"""Sizes and durations: parse what people write and format what they read."""

import datetime
import math
import re

from ullage.errors import InvalidValue

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
INT_MAX = 2**31 - 1  # the largest number of 32 bits

_BYTE_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTE_FACTORS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_SECOND_FACTORS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_JOULE_FACTORS = {"": 1e6, "j": 1.0, "kj": 1e3, "mj": 1e6, "gj": 1e9, "wh": 3600.0, "kwh": 3.6e6}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Parse bytes from `"40GiB"`, `"40 GB"` (decimal), `"512M"` (binary) or a plain number.

    >>> parse_bytes("1.5GiB")
    1610612736
    """
    if isinstance(text, int):
        return text
    return round(_parse(text, _BYTE_FACTORS, "size must look like 512MiB, 40GB or 1.5GiB"))


def format_bytes(count: int | None) -> str:
    """Format a size in binary units with three digits; `None` is "unknown".

    >>> format_bytes(1610612736), format_bytes(-512), format_bytes(None)
    ('1.50 GiB', '-512 B', 'unknown')
    """
    if count is None:
        return "unknown"
    sign, size = ("-", -count) if count < 0 else ("", count)
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            value = size / factor
            return f"{sign}{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{sign}{size} B"


def parse_duration(text: str | float) -> float:
    """Parse seconds from `"90s"`, `"1.5h"`, `"250ms"` or a plain number.

    >>> parse_duration("1.5h")
    5400.0
    """
    if isinstance(text, int | float):
        return float(text)
    return _parse(text, _SECOND_FACTORS, "duration must look like 90s, 15m or 1.5h")


def format_duration(seconds: float | None) -> str:
    """Format a duration with two or three digits; `None` is "unknown".

    >>> format_duration(0.0123), format_duration(75), format_duration(3600), format_duration(None)
    ('12.3 ms', '1 min 15 s', '1 h', 'unknown')
    """
    if seconds is None:
        return "unknown"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s".removesuffix(" 0 s")
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min".removesuffix(" 0 min")


def parse_energy(text: str) -> float:
    """Parse joules from `"30MJ"`, `"500 kJ"` or `"2kWh"`; a plain number is megajoules.

    >>> parse_energy("30MJ"), parse_energy("2kWh")
    (30000000.0, 7200000.0)
    """
    return _parse(text, _JOULE_FACTORS, "energy must look like 500kJ, 30MJ or 2kWh")


def energy_unit(joules: float) -> tuple[float, str]:
    """Return a readable unit for an amount of energy: its joules and its name.

    >>> energy_unit(25e3), energy_unit(33.2e6)
    ((1000.0, 'kJ'), (1000000.0, 'MJ'))
    """
    return next(((factor, name) for factor, name in ((1e6, "MJ"), (1e3, "kJ")) if joules >= factor), (1.0, "J"))


def format_energy(joules: float) -> str:
    """Format energy with three digits.

    >>> format_energy(131_000.0), format_energy(2.5e9), format_energy(7.0)
    ('131 kJ', '2,500 MJ', '7 J')
    """
    factor, name = energy_unit(joules)
    value = joules / factor
    return f"{value:,.0f} {name}" if value >= 100 else f"{value:.3g} {name}"


def format_moment(seconds: float) -> str:
    """Format seconds since 1970 as local date and time."""
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S").removesuffix(":00")


def ceil_div(number: int, divisor: int) -> int:
    """Divide whole numbers and round up; also columns of NumPy."""
    return -(-number // divisor)


def round_up(number: int, unit: int) -> int:
    """Round up to a multiple of a unit; also columns of NumPy."""
    return -(-number // unit) * unit


def last_power_of_two(number: int) -> int:
    """Return the largest power of two that is at most `number`, or 1."""
    return 1 << (max(number, 1).bit_length() - 1)


def _parse(text: str, factors: dict[str, float] | dict[str, int], rule: str) -> float:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    factor = factors.get(match[2].casefold()) if match else None
    if match is None or factor is None:
        raise InvalidValue(f"{rule}, got {text!r}")
    value = float(match[1]) * factor
    if not math.isfinite(value):
        raise InvalidValue(f"{rule}, got {text[:20]!r}..., which is not a finite number")
    return value
