"""`ullage.estimate`, and the same question about a workload that is already known."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ullage.errors import InvalidValue, UnknownName
from ullage.estimation.estimators.registry import check_name, estimators, find
from ullage.hardware import GPU, default_gpu
from ullage.hardware import gpu as find_gpu
from ullage.jobs.kinds import MODEL, SCRIPT
from ullage.jobs.workload import Workload, workload_of
from ullage.performance.cost import PLAN_OPTIONS, TrainingPlan
from ullage.performance.result import Utilization
from ullage.virtual.releases import refuse_if_unserved

if TYPE_CHECKING:
    from ullage.allocator import AllocatorConfig
    from ullage.estimation.result import Estimate
    from ullage.estimation.timeline.trace import Trace

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _names_unknown_options(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """An option that the function does not have raises `UnknownName` with the nearest ones, not `TypeError`."""
    options = [name for name, it in inspect.signature(function).parameters.items() if it.kind is it.KEYWORD_ONLY]

    @functools.wraps(function)
    def call(*args: _P.args, **given: _P.kwargs) -> _R:
        for name in given:
            if name not in options and name != "source":
                raise UnknownName("option", name, options)
        return function(*args, **given)

    return call


@_names_unknown_options
def estimate(
    source: str | Path | Callable[[], Any],
    *,
    gpu: str | GPU | None = None,
    estimator: str = "ullage",
    steps: int | None = 3,
    batch_size: int | None = None,
    input_shape: Sequence[int] | None = None,
    sequence_length: int | None = None,
    num_classes: int | None = None,
    optimizer: str | None = None,
    precision: str | None = None,
    gradient_accumulation: int | None = None,
    checkpointing: bool = False,
    attention: str | None = None,
    channels_last: bool = False,
    freeze: str | Sequence[str] | None = None,
    lora: int | None = None,
    lora_targets: str | Sequence[str] | None = None,
    quantize: str | None = None,
    dtype: str | None = None,
    inference: bool = False,
    config: str | Path | Mapping[str, Any] | None = None,
    set: Mapping[str, Any] | None = None,
    args: Sequence[str] | None = None,
    module: bool = False,
    timeout: float | None = None,
    show_output: bool = False,
    network: bool = False,
    python: str | Path | None = None,
    trace: Trace | None = None,
    trace_file: str | Path | None = None,
    allocator_config: AllocatorConfig | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    ranks: Sequence[int] | None = None,
    nodes: int | None = None,
    interconnect: str | None = None,
    launcher: str | None = None,
    parallel: str | None = None,
    epochs: float | None = None,
    samples: int | None = None,
    samples_per_step: int | None = None,
    total_steps: int | None = None,
    input_rate: float | None = None,
    prices: str | Path | Mapping[str, Any] | None = None,
) -> Estimate:
    """Estimate how much memory a training job will take on `gpu`, and how long a step takes. No GPU is needed.

    Args:
        source: A model's name (`"torchvision:resnet50"`, `"timm:NAME"`, `"hf:ORG/NAME"` of the Hugging Face hub,
            `"hf:CLASS"`, `"package.module:factory"`), a function without arguments that trains on "cuda", the path of a
            script, or a text file with a model summary for the estimators that read one.
        gpu: A name from `ullage.gpus()`, the path of a TOML file, `"local"`, or a `GPU`. Default: the first GPU of this
            machine, else an H200.
        estimator: Which estimator to use; one of `ullage.estimators()`.
        steps: Follow the job for at least this many optimizer steps; `None` lets it run to its end.
        allocator_config: Settings of PyTorch's allocator. By default those of `PYTORCH_ALLOC_CONF`.

    For a model's name:

    Args:
        batch_size: Samples in a batch. Default: 32.
        input_shape: Shape of one sample, such as `(3, 224, 224)`. Default: what the model was made for.
        sequence_length: Tokens in a sample. Default: the model's limit, at most 1024.
        num_classes: Default: the model's own number.
        optimizer: `"adamw"` (the default), `"sgd"`, `"adam_fused"`, ... or any class of `torch.optim`.
        precision: `"fp32"`, `"tf32"`, `"amp_fp16"`, `"amp_bf16"`, `"bf16"` or `"fp16"`. Default: `"fp32"`; for
            `hf:ORG/NAME` and folders the type in which the weights were saved.
        dtype: The type that the weights are loaded in: `"float32"`, `"bfloat16"` or `"float16"`.
        gradient_accumulation: Batches for each optimizer step. Default: 1.
        checkpointing: Recompute activations in the backward pass.
        attention: `"sdpa"`, `"eager"`, `"flash"`, `"efficient"`, `"cudnn"` or `"math"`.
        channels_last: Images and weights in channels-last order.
        freeze: Layers that are not trained, by name or pattern.
        lora: Train only LoRA adapters of this rank.
        lora_targets: The layers that get adapters, such as `["q_proj", "v_proj"]`. Default: every linear one but the
            last.
        quantize: Hold the frozen weights in `"nf4"`, `"fp4"` or `"int8"`, for `hf:` models.
        inference: The forward pass only, without gradients.
        config: The config for `hf:CLASS`: a JSON file, a folder with a `config.json`, a name of the hub, or a dict.
        set: Single values: of that config, arguments of the model, or options of the estimator with its name before
            them, as in `{"deepspeed.stage": 3}`.

    For a script:

    Args:
        args: The script's own arguments.
        module: `source` is the name of a module, as in `python -m`.
        timeout: Give up after this many seconds. Default: 300.
        show_output: Show what the script prints, on standard error.
        network: Let the script reach other machines.
        python: Run the script in another Python: the path of one, the folder of an environment, or the name of a
            conda environment. It needs PyTorch 2.6 or newer, and does not need Ullage. Default: this Python.
        trace_file: Save every request to this file.

    For a job of many ranks: a script or a function that uses `torch.distributed`, or a model's name:

    Args:
        world_size: The number of ranks, each with a GPU like this one. The job runs once, as one of them, with what
            torchrun would set.
        rank: Which of them. Default: 0, and the last stage of a pipeline.
        ranks: Several of them, such as `[0, 7]`. The estimate is that of the one that takes most; `Estimate.ranks` has
            the figures of each.
        nodes: On how many machines they are. Default: 1.
        parallel: How a model by name is spread over them: `"ddp"` (the default), `"fsdp2"`, `"tp"` or `"pp"`.
        interconnect: The network inside a machine, the one between machines, or both: `"nvlink4,ib-ndr"`,
            `"pcie4,eth-100"`, `"4xib-hdr"` for four adapters in each. Default: what machines with this GPU are sold
            with.
        launcher: What starts them: `"torchrun"` (the default), `"mpirun"` or `"srun"`, whose variables the job then
            has, or `"accelerate launch"` with its options, which accelerate itself reads.

    How long a training takes (`Estimate.training`):

    Args:
        epochs: How often the data is gone through. Default: once, if `samples` is given.
        samples: Samples in an epoch. Default: what the DataLoader of a script says.
        samples_per_step: Samples that a step takes. Default: `batch_size` of a model, times `gradient_accumulation`;
            what the DataLoader of a script gives.
        total_steps: The length in steps, instead of `epochs` and `samples`.
        input_rate: Samples that the data loader delivers in a second: a step is not quicker than its input.
        prices: A TOML file with prices, or its content: `{"currency": "EUR", "kwh": 0.3, "hour": {"H200": 3.5}}`.
            Default: `prices.toml` in Ullage's folder, if it is there.

    For a model's name or a function:

    Args:
        trace: An empty `Trace`, which is filled with every request.

    Returns:
        An `Estimate`; `print` shows it as a report.

    Raises:
        UllageError: With one message that says what was needed and what was found.

    >>> estimate("torchvision:resnet18", batch_size=8, input_shape=[3, 64, 64], gpu="A100-40GB").fits
    True
    >>> estimate("torchvision:resnet18", batch_size=8, estimator="accelerate").figure_kind
    'allocated'

    Not covered: a process that uses several GPUs itself; what ranks do that differ from the one that was followed.
    """
    options = {name: value for name, value in locals().items() if name not in ("source", "gpu", "estimator")}
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    given["steps"] = steps
    check_name(estimator)
    plan = TrainingPlan.of(**{name: given.pop(name) for name in PLAN_OPTIONS if name in given})
    workload = workload_of(source, given, estimator)
    check_plan(plan, workload)
    return estimate_workload(workload, gpu, estimator).for_training(plan)


def utilization(source: str | Path | Callable[[], Any], *, gpu: str | GPU | None = None, **options: Any) -> Utilization:
    """How long a step of a training job takes on `gpu`, and how busy it keeps it. No GPU is needed.

    Args:
        source: A model's name, a function or a script, as for `ullage.estimate`.
        gpu: The GPU, as for `ullage.estimate`.
        options: Other options of `ullage.estimate`. With `input_rate` a step is not quicker than its input.

    Returns:
        A `Utilization`; `print` shows it in words.

    Raises:
        UllageError: Where no step was seen, and for all that `ullage.estimate` refuses.

    >>> found = utilization("torchvision:resnet18", batch_size=8, input_shape=[3, 64, 64], gpu="H200")
    >>> found.samples, found.measured
    (8, True)

    Not covered: validation and checkpoints; several GPUs.
    """
    found = estimate(source, gpu=gpu, **options)
    if found.utilization is None:
        reasons = [note for note in found.notes if "not known" in note] or ["no step was seen to its end"]
        raise InvalidValue(f"there is no time of a step: {reasons[0]}")
    return found.utilization


def check_plan(plan: TrainingPlan, workload: Workload) -> None:
    """Refuse what the run of a workload could not tell."""
    plan.check(tells_epoch=workload.kind == SCRIPT, tells_step=workload.kind in (SCRIPT, MODEL))


def estimate_workload(workload: Workload, gpu: str | GPU | None, estimator: str = "ullage") -> Estimate:
    """The estimate of one workload on one GPU, by default this machine's own, else an H200.

    >>> from ullage.jobs.configuration import Configuration
    >>> mlp = Workload(configuration=Configuration(model="mlp:x", widths=[8, 4], batch_size=2))
    >>> estimate_workload(mlp, "T4").fits
    True
    """
    answer = find(estimator).estimate(workload, find_gpu(gpu or default_gpu()))
    return answer if gpu is not None else answer.on_assumed_gpu()


def ask(name: str, row: dict[str, Any], gpu: str) -> Estimate | str:
    """The estimate that an estimator gives for a line of measurements, or the reason why it does not support it.

    Everything is plain values, so that another process can be asked. `Workload.from_row` says what a line holds.

    >>> ask("ullage", {"model": "mlp:x", "widths": [8, 4], "batch": 2}, "T4").figure_kind
    'process'
    """
    found = find(name)
    workload = Workload.from_row(row)
    reason = found.supports(workload)
    return reason if reason is not None else found.run(workload, find_gpu(gpu))


def estimator_list(text: str) -> list[str]:
    """The estimators that "all" or a comma-separated list means, each once.

    >>> estimator_list("ullage, ullage")
    ['ullage']
    """
    refuse_if_unserved()
    if text.strip().casefold() == "all":
        return estimators()
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise InvalidValue(f"needed 'all' or names of estimators, separated by commas; found {text!r}")
    return [find(name).name for name in names]
