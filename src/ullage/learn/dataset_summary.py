"""What a data set holds: counts, classes of memory, shares of optimizers and precisions, for each family."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ullage.units import GIB

if TYPE_CHECKING:
    import polars

CLASS_SIZES = {"classes_1gib": GIB, "classes_8gib": 8 * GIB}
_SHARED = ("arch", "optimizer", "precision", "activation_function")
_ENVIRONMENT = ("gpu", "torch", "cuda", "cudnn", "driver", "source")


def summarize(table: polars.DataFrame) -> dict[str, Any]:
    """Of a table of `read_dataset`; a class of memory is the whole number of GiB below the process's memory.

    >>> from ullage.learn.schema import frame
    >>> found = summarize(frame([{"id": "a", "family": "mlp", "process_memory": 9 * GIB}]))
    >>> found["families"]["mlp"]["classes_1gib"], found["families"]["mlp"]["classes_8gib"]
    ({9: 1}, {1: 1})
    """
    names = _counted(table["family"].to_list())
    return {
        "rows": len(table),
        **{name: _counted(table[name].to_list()) for name in _ENVIRONMENT},
        "families": {name: _family(table.filter(table["family"] == name)) for name in names},
    }


def _family(table: polars.DataFrame) -> dict[str, Any]:
    memory = table["process_memory"].drop_nulls()
    layers = table["layers"].list.len().drop_nulls()
    return {
        "rows": len(table),
        "with_memory": len(memory),
        "with_utilization": len(table["gract"].drop_nulls()),
        "memory": _spread(memory),
        "parameters": _spread(table["parameters"].drop_nulls()),
        "batch_size": _spread(table["batch_size"].drop_nulls()),
        "layers": _spread(layers),
        **{name: dict(sorted(Counter((memory // size).to_list()).items())) for name, size in CLASS_SIZES.items()},
        **{name: _counted(table[name].to_list()) for name in _SHARED},
    }


def _spread(values: polars.Series) -> dict[str, int] | None:
    """Smallest, median and largest; `None` where nothing is known."""
    if not len(values):
        return None
    ordered = sorted(values.to_list())
    return {"smallest": ordered[0], "median": ordered[len(ordered) // 2], "largest": ordered[-1]}


def _counted(values: list[Any]) -> dict[str, int]:
    return dict(Counter("unknown" if value is None else value for value in values).most_common())
