"""`ullage.estimate`: the same question to any estimator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue
from ullage.estimation import running
from ullage.estimation.estimators.registry import Estimator, Workload, estimators, find
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.workloads.configuration import Configuration

DEFAULT = "ullage"
SUMMARIES = (".txt", ".model", ".summary")


def estimate(
    source: str | Path | Callable[[], Any], *, gpu: str | GPU = "H200", estimator: str = DEFAULT, **options: Any
) -> Estimate:
    """How much memory a training job will take on `gpu`, found without a GPU.

    `source` is a model's name (`"torchvision:resnet50"`, `"timm:NAME"`, `"hf:CLASS"`, `"package.module:factory"`), a
    function without arguments that trains on "cuda", or the path of a script (with `module=True` the name of a
    module). For all: `steps`, `config` (allocator settings). For names: `batch_size`, `input_shape`,
    `sequence_length`, `num_classes`, `optimizer`, `precision`, `gradient_accumulation`, `checkpointing`, `attention`,
    `channels_last`, `freeze`, `lora_rank`, `inference`, `set` and `config` (a model's config: a file or a dict). For
    functions: `trace`. For scripts: `args`, `module`, `timeout`, `trace_file`, `show_output`.

    `estimator` is one of `ullage.estimators()`; docs/estimators.md tells what each knows. Its own options go into
    `set` with its name before them: `set={"deepspeed.stage": 3}`. A text file with a model summary is a source too,
    for the estimators that read one.

    >>> estimate("torchvision:resnet18", batch_size=8, input_shape=[3, 64, 64], gpu="A100-40GB").fits
    True
    >>> estimate("torchvision:resnet18", batch_size=8, estimator="accelerate").figure_kind
    'allocated'

    Not covered: more than one GPU, but for the estimators that have an option for it.
    """
    if estimator == DEFAULT and not is_summary(source):
        return running.estimate_on_virtual_gpu(source, gpu=gpu, **options)
    chosen = find(estimator)
    return chosen.estimate(workload_of(source, chosen, options), find_gpu(gpu))


def is_summary(source: Any) -> bool:
    """Whether a source is a text file with a model summary; a file without such an ending may be a script.

    >>> is_summary("torchvision:resnet18"), is_summary("train.py"), is_summary("resnet50.txt")
    (False, False, True)
    """
    return isinstance(source, str | Path) and str(source).endswith(SUMMARIES) and ":" not in str(source)


def workload_of(source: Any, chosen: Estimator, options: dict[str, Any]) -> Workload:
    """What is asked of an estimator, from the arguments of `ullage.estimate`."""
    if is_summary(source):
        return _summary(Path(source), options)
    kind = running.kind_of(source, bool(options.get("module")))
    own, options = _own_options(chosen.name, options)
    running.check_options(kind, options)
    if kind == running.FUNCTION:
        return Workload(function=source, run=options, options=own)
    if kind == running.SCRIPT:
        words = tuple(str(word) for word in options.pop("args", ()))
        return Workload(script=str(source), args=words, run=options, options=own, source=str(source))
    of_model, of_run = running.split_options(options)
    configuration = Configuration.from_options(str(source), **of_model)
    return Workload(configuration=configuration, run=of_run, options=own, source=str(source))


def _own_options(name: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The estimator's own options out of `set`, and all others."""
    prefix = name.partition("+")[0] + "."
    settings = options.get("set") or {}
    own = {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
    rest = {key: value for key, value in settings.items() if not key.startswith(prefix)}
    others = {key: value for key, value in options.items() if key != "set"}
    return own, others | ({"set": rest} if rest else {})


def _summary(file: Path, options: dict[str, Any]) -> Workload:
    unused = sorted(set(options) - {"batch_size", "steps"})
    if unused:
        raise InvalidValue(f"{file} is a model summary: of the options only batch_size counts; found {unused[0]}")
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"cannot read {file} as a model summary: {error}") from None
    return Workload(summary_text=text, batch_size=options.get("batch_size"), source=str(file))


# One question to one estimator, in plain values: what a process that knows only a row and two names can ask.


def ask(name: str, row: dict[str, Any], gpu: str) -> Estimate | str:
    """The estimate that the estimator `name` gives for a row, or the reason why it does not support it.

    A row is a configuration as measured files have it, or `{"script": "train.py", "args": [...]}`; for a script,
    `run` may hold what the virtual GPU takes (`module`, `timeout`, `steps`).

    >>> ask("ullage", {"model": "mlp:x", "widths": [8, 4], "batch": 2}, "T4").figure_kind
    'process'
    """
    found = find(name)
    workload = workload_of_row(row)
    reason = found.supports(workload)
    return reason if reason is not None else found.run(workload, find_gpu(gpu))


def workload_of_row(row: dict[str, Any]) -> Workload:
    """The workload of a row.

    >>> workload_of({"script": "train.py", "args": ["--epochs", "1"]}).args
    ('--epochs', '1')
    """
    run = dict(row.get("run", {}))
    if "script" in row:
        return Workload(script=str(row["script"]), args=tuple(row.get("args", ())), run=run)
    return Workload(configuration=Configuration.from_row(row), run=run)


def estimator_list(text: str) -> list[str]:
    """The estimators that "all" or names with commas mean, each once.

    >>> estimator_list("ullage, ullage")
    ['ullage']
    """
    if text.strip().casefold() == "all":
        return estimators()
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise InvalidValue(f"needed 'all' or names of estimators with commas; found {text!r}")
    return [find(name).name for name in names]
