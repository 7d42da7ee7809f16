"""Reads data sets of `ullage dataset clean`; what is wrong with a file is one message."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.errors import InvalidValue, MissingPackage

if TYPE_CHECKING:
    import polars


def load_polars() -> Any:
    """The package polars, or what to type where it is missing."""
    try:
        import polars
    except ImportError:
        raise MissingPackage("polars", "data sets") from None
    return polars


def read_parquet(file: Path, columns: Sequence[str] | None = None) -> polars.DataFrame:
    """The table of a Parquet file, or some of its columns; a file that is none is refused with the reason."""
    pl = load_polars()
    try:
        table: polars.DataFrame = pl.read_parquet(file, columns=columns)
    except (OSError, pl.exceptions.PolarsError) as error:
        told = (str(error).splitlines() or [""])[0]
        raise InvalidValue(f"needed a Parquet file of 'ullage dataset clean'; cannot read {file}: {told}") from None
    return table
