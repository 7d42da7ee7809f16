"""The columns of a data set's Parquet file, each with its type and meaning; see lab/docs/data.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.errors import InvalidValue, MissingPackage
from ullage.units import GIB

if TYPE_CHECKING:
    import polars


# The summary of a data set: counts, classes of memory, shares of optimizers and precisions, for each family.

CLASS_SIZES = {"classes_1gib": GIB, "classes_8gib": 8 * GIB}
_SHARED = ("arch", "optimizer", "precision", "activation_function")
_ENVIRONMENT = ("gpu", "torch", "cuda", "cudnn", "driver", "source")
READ = ("step_seconds", "host_seconds", "gract", "smact", "smocc", "drama", "tensor", "power_w", "energy_step")
CHUNK = 500  # rows made into a frame at once: layers as Python objects are a hundred times larger than in the file


def summarize(table: polars.DataFrame) -> dict[str, Any]:
    """Summarize a table of `read_dataset`. A class of memory is the process's memory rounded down to GiB."""
    names = _counted(table["family"].to_list())
    return {
        "rows": len(table),
        **{name: _counted(table[name].to_list()) for name in _ENVIRONMENT},
        "families": {name: _family(table.filter(table["family"] == name)) for name in names},
        "readings": _readings(table.filter(table["step_seconds"].is_not_null())),
    }


def _readings(table: polars.DataFrame) -> dict[str, Any]:
    """Summarize runs that were read alone, by kind of model: number, families, and the spread of figures."""
    known = table.filter(table["kind"].is_not_null())
    summary = {}
    for kind in _counted(known["kind"].to_list()):
        part = known.filter(known["kind"] == kind)
        tested = part.filter(part["split"] == "test")
        summary[kind] = {
            "rows": len(part),
            "families": part["model_family"].n_unique(),
            "test_rows": len(tested),
            "test_families": sorted(tested["model_family"].unique().to_list()),
            **{name: _tenths(part[name].drop_nulls()) for name in READ},
        }
    return summary


def _tenths(values: polars.Series) -> list[float] | None:
    """Return the first decile, the median and the ninth decile."""
    ordered = sorted(values.to_list())
    return [ordered[(len(ordered) - 1) * part // 10] for part in (1, 5, 9)] if ordered else None


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
    """Return smallest, median and largest; `None` if there are no values."""
    if not len(values):
        return None
    ordered = sorted(values.to_list())
    return {"smallest": ordered[0], "median": ordered[len(ordered) // 2], "largest": ordered[-1]}


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles of one or more times; each is one of the times, never a mean of two.

    >>> quartiles([0.3, 0.1, 0.2, 0.4, 0.5])
    (0.2, 0.3, 0.4)
    """
    ordered = sorted(times)
    low, middle, high = (round(ordered[(len(ordered) - 1) * part // 4], 6) for part in (1, 2, 3))
    return low, middle, high


def _counted(values: list[Any]) -> dict[str, int]:
    return dict(Counter("unknown" if value is None else value for value in values).most_common())


# Reads data sets of `ullage lab data clean`; a problem with a file is one message.


def load_polars() -> Any:
    """Return the package polars, or raise an error with the command that installs it."""
    try:
        import polars
    except ImportError:
        raise MissingPackage("polars", "data sets") from None
    return polars


def read_parquet(file: Path, columns: Sequence[str] | None = None) -> polars.DataFrame:
    """Read a Parquet file, or some of its columns; refuse another file with the reason."""
    pl = load_polars()
    try:
        table: polars.DataFrame = pl.read_parquet(file, columns=columns)
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = (str(error).splitlines() or [""])[0].removesuffix(f": {file}")
        raise InvalidValue(f"{file} must be a Parquet file of 'ullage lab data clean': {reason}") from None
    return table


@dataclass(frozen=True)
class Column:
    """A column: `kind` is "text", "whole", "number" or "layers"."""

    name: str
    kind: str
    text: str


COUNTED = ("linear", "conv1d", "conv2d", "batch_norm", "layer_norm", "dropout", "embedding", "attention", "pooling")

COLUMNS = (
    Column("id", "text", "the run's own name; one of its kind for a GPU and a version of PyTorch"),
    Column("family", "text", "mlp, cnn or transformer; the source of the model (timm, hf, ...) for others"),
    Column("arch", "text", "the form: pyramid, residual, encoder, ..."),
    Column("model_family", "text", "models with the same layers up to their sizes: resnet, llama, generated cnn dense"),
    Column("kind", "text", "cnn, transformer, mlp, or other"),
    Column("split", "text", "train, or test for families that no fit has seen; by the family's name alone"),
    Column("configuration", "text", "the run as JSON: what `Model.from_row` reads"),
    Column("batch_size", "whole", "samples"),
    Column("input_elements", "whole", "numbers of one sample: pixels, features or token ids"),
    Column("sequence_length", "whole", "tokens of a sample; null where there are none"),
    Column("parameters", "whole", "numbers"),
    Column("activations", "whole", "numbers that all layers put out for one sample"),
    Column("activations_batch", "whole", "the same for the batch"),
    Column("depth", "whole", "layers that multiply: linear, convolutions, recurrent"),
    *(Column(f"count_{kind}", "whole", f"layers of the type {kind}") for kind in COUNTED),
    Column("activation_function", "text", "the most frequent one, as a class of torch.nn in small letters"),
    Column("optimizer", "text", "adam, adamw, adamw_fused, sgd, sgdm, rmsprop, adagrad, adafactor, ..."),
    Column("precision", "text", "fp32, amp_bf16, amp_fp16, bf16, ..."),
    Column("layers", "layers", "in the order of the forward pass: type, activations of one sample, parameters"),
    Column("trainable", "whole", "parameters that get gradients"),
    Column("kept_numbers", "whole", "numbers that autograd keeps for the backward pass, of one sample"),
    Column("kept_bytes", "whole", "bytes that it keeps in other types (masks, indices), of one sample"),
    Column("norm_numbers", "whole", "numbers that layer norms put out for one sample"),
    Column("output_elements", "whole", "numbers that the model puts out for one sample"),
    Column("peak_allocated", "whole", "bytes in tensors at most: PyTorch's allocated memory"),
    Column("peak_reserved", "whole", "bytes that PyTorch's allocator had from the driver at most"),
    Column("process_memory", "whole", "bytes that nvidia-smi shows at the peak: peak_reserved + context"),
    Column(
        "context",
        "whole",
        "bytes of the process outside PyTorch's memory after the last step, kernels loaded; null "
        "where runs shared a process: process_memory then has the one of most runs of the same kind",
    ),
    Column("step_seconds", "number", "time of a training step, alone on the GPU: mean over the reading"),
    Column("step_q1", "number", "the same, first quartile over the steps"),
    Column("step_median", "number", "the same, median"),
    Column("step_q3", "number", "the same, third quartile"),
    Column("steps", "whole", "steps that were read"),
    Column("host_seconds", "number", "until all kernels of a step are launched, while the GPU has nothing else to do"),
    Column("host_forward", "number", "of host_seconds, what passes until the backward pass begins"),
    Column("host_backward", "number", "of host_seconds, the backward pass; the rest is the optimizer's"),
    Column("gract", "number", "share of time in which the GPU did anything, 0 to 1"),
    Column("smact", "number", "share of multiprocessors with work, mean over time, 0 to 1"),
    Column("smocc", "number", "share of warps in use, mean over time, 0 to 1"),
    Column("drama", "number", "share of time in which memory was read or written, 0 to 1"),
    Column("tensor", "number", "share of time in which tensor cores worked, 0 to 1"),
    Column("power_w", "number", "mean power of the GPU in watts"),
    Column("energy_step", "number", "joules of the GPU for a step"),
    Column("clock_mhz", "number", "clock of the SMs, mean of the reading's beginning and end"),
    Column("pcie_rx", "number", "bytes a second that the GPU got over PCIe"),
    Column("pcie_tx", "number", "bytes a second that the GPU sent over PCIe"),
    Column("cpu_percent", "number", "of one core"),
    Column("host_busy", "number", "cores of the host that worked during the reading, for this run and anything else"),
    Column("host_stolen", "number", "share of the processors' time that a virtual machine's host gave to others"),
    Column("ram_bytes", "whole", "resident memory of the process on the host"),
    Column("gpu", "text", "as `ullage gpus` names it"),
    Column("machine", "text", "the GPU's UUID: rows of one machine have the same host; hosts differ in speed"),
    Column("torch", "text", "version of PyTorch"),
    Column("cuda", "text", "version of CUDA that PyTorch was built for"),
    Column("cudnn", "text", "version of cuDNN as a number, 91900 for 9.19.0"),
    Column("driver", "text", "version of the GPU's driver"),
    Column("source", "text", "name of the file that the memory was read from"),
)
NAMES = tuple(column.name for column in COLUMNS)
# Columns that are null in data sets of earlier releases.
LATER = (
    "model_family",
    "kind",
    "split",
    "step_q1",
    "step_median",
    "step_q3",
    "steps",
    "host_seconds",
    "tensor",
    "energy_step",
    "clock_mhz",
    "host_busy",
    "host_stolen",
    "machine",
    "host_forward",
    "host_backward",
)
LAYER_FACTS = ("type", "activations", "parameters")


def frame(rows: Iterable[dict[str, Any]]) -> polars.DataFrame:
    """Return rows as a table; missing columns of a row are null. `layers` may be tuples or dictionaries."""
    pl = load_polars()
    layer = {name: pl.String if name == "type" else pl.Int64 for name in LAYER_FACTS}
    kinds = {
        "text": pl.String,
        "whole": pl.Int64,
        "number": pl.Float64,
        "layers": pl.List(pl.Struct(layer)),
    }
    schema = {column.name: kinds[column.kind] for column in COLUMNS}
    frames, chunk = [pl.DataFrame(schema=schema)], []
    for row in rows:
        chunk.append({name: row.get(name) for name in NAMES} | {"layers": _layers(row.get("layers"))})
        if len(chunk) == CHUNK:
            frames.append(pl.DataFrame(chunk, schema=schema))
            chunk = []
    made: polars.DataFrame = pl.concat([*frames, pl.DataFrame(chunk, schema=schema)], rechunk=True)
    return made


def _layers(layers: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    if layers is None:
        return None
    return [layer if isinstance(layer, dict) else dict(zip(LAYER_FACTS, layer, strict=True)) for layer in layers]


def write_dataset(table: polars.DataFrame, file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        table.write_parquet(file, compression="zstd")
    except OSError as error:
        raise InvalidValue(f"cannot write {file}: {error.strerror or error}") from None


def read_dataset(file: Path) -> polars.DataFrame:
    """Read a Parquet file of `ullage lab data clean`; refuse another file with the reason."""
    table = read_parquet(file)
    missing = [name for name in NAMES if name not in table.columns]
    wrong = [name for name in missing if name not in LATER]
    if wrong:
        raise InvalidValue(f"{file} must be a data set of 'ullage lab data clean': it lacks the column {wrong[0]}")
    if not missing:
        return table
    schema = frame([]).schema
    added = [load_polars().lit(None, dtype=schema[name]).alias(name) for name in missing]
    return table.with_columns(added).select(NAMES)
