"""`ullage lab train`: trains estimators on the user's measurements."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ullage.cli import completion
from ullage.cli.completion import FAMILIES
from ullage.cli.measured_files import check_file
from ullage.cli.options import Json, Seed, argument, command_group, option
from ullage.cli.progress import following
from ullage.errors import InvalidValue, UnknownName
from ullage_lab.cli.scores import print_noise_of_turns, print_rows, print_sharing, print_table7, print_utilization

if TYPE_CHECKING:
    from ullage_lab.train.protocol import Trained

train = command_group(
    "Train estimators on measured data: gpumemnet, fast, dnnperf; and gpuutilnet, utilization, sharing."
)
Data = Annotated[
    Path, option("Rows written by 'ullage lab data clean' (Parquet), or the authors' table (.csv).", "FILE")
]
Family = Annotated[str, option("Train for a family: mlp, cnn or transformer.", "NAME", complete=completion.families)]
Out = Annotated[Path, option("Write the weights here.", "FILE.safetensors")]
Kind = Annotated[
    str, option("mlp (an ensemble) or transformer.", "--architecture NAME", complete=completion.architectures)
]
Epochs = Annotated[int | None, option("Maximum number of epochs.", "N", min=1, default="by architecture")]
Validate = Annotated[bool, option("Cross-validate first: four trainings instead of one.", "--validate/--no-validate")]
Page = Annotated[Path | None, option("Write scores and plots to this HTML page.", "FILE.html")]


@train.command()
def gpumemnet(
    data: Data,
    family: Family,
    out: Out,
    architecture: Kind = "mlp",
    bin: Annotated[str | None, option("Width of a memory class.", "--bin SIZE", default="1GiB, 8GiB")] = None,
    seed: Seed = 1,
    epochs: Epochs = None,
    validate: Validate = True,
    report: Page = None,
    as_json: Json = False,
) -> None:
    """Train GPUMemNet as published: networks over totals of a model summary, or over its sequence of layers.

    They classify jobs into bins of memory: of 1 GiB for MLPs and of 8 GiB for CNNs and Transformers, as in the paper.

    30% of the rows are held out, the rest is cross-validated in 3 folds with a new network in each; then a network
    learns from all of the rest and is tested once.

    Examples:

      ullage lab train gpumemnet --data h200.parquet --family cnn --out cnn.safetensors
      ullage lab train gpumemnet --data x.parquet --family mlp --architecture transformer --bin 2GiB --out w.safetensors
    """
    check_family(family)
    from dataclasses import replace

    from ullage.estimation.estimators.gpumemnet import networks
    from ullage.units import GIB, parse_bytes
    from ullage_lab.estimators.weights import save_network
    from ullage_lab.train.fitting import SCHEDULES
    from ullage_lab.train.protocol import examples_of, read_rows
    from ullage_lab.train.protocol import train as learn

    if architecture not in SCHEDULES:
        raise UnknownName("gpumemnet architecture", architecture, SCHEDULES, hint="mlp or transformer")
    for file in (out, report):
        check_file(file)
    width = parse_bytes(bin) if bin is not None else networks.WIDTHS[family, architecture][0] * GIB
    if width < 1 << 20:
        raise InvalidValue(f"--bin must be a class of at least 1 MiB, got {bin}")
    planned = SCHEDULES[architecture]
    with following(f"reading {data.name}") as going:
        examples = examples_of(read_rows(data, family))
        result = learn(
            examples,
            family=family,
            estimator=architecture,
            bin=width,
            seed=seed,
            schedule=replace(planned, epochs=epochs or planned.epochs),
            begin=going.begin,
            notify=going.step,
            validate=validate,
        )
    save_network(result.network, result.card, out)
    if report is not None:
        from ullage_lab.train.report import write_report

        write_report(result, examples, report)
    if as_json:
        print(json.dumps({"out": str(out), "figures": result.card.figures, "rows": result.card.rows}))
        return
    _print_trained(result, out)


@train.command()
def gpuutilnet(
    data: Data,
    out: Out,
    seed: Seed = 1,
    epochs: Epochs = None,
    as_json: Json = False,
) -> None:
    """Train GPUUtilNet as published: GPUMemNet's features, and three classes of SMACT, SMOCC and DRAMA.

    A network for each family and metric, in one file; 30% of the rows are held out and judged in the end.

    Examples:

      ullage lab train gpuutilnet --data benchmarks/data/generated_h200.parquet --out gpuutilnet.safetensors
      ullage lab evaluate gpuutilnet --weights gpuutilnet.safetensors
    """
    from dataclasses import replace

    from ullage_lab.estimators.gpuutilnet import BINS, save
    from ullage_lab.train import table7
    from ullage_lab.train.protocol import read_rows

    check_file(out)
    with following(f"reading {data.name}") as going:
        rows = read_rows(data)
        going.begin("training", len(BINS))
        schedule = replace(table7.SCHEDULE, epochs=epochs or table7.SCHEDULE.epochs)
        model = table7.train(rows, seed=seed, schedule=schedule, notify=going.step)
    save(model, out)
    print_table7(table7.lines_of(model, rows), as_json)


@train.command()
def utilization(
    data: Annotated[
        list[Path],
        option("Runs that were read alone: rows of 'ullage lab data clean' (Parquet). Repeat it for more.", "FILE"),
    ],
    rates: Annotated[
        list[Path], option("Operator calls that 'ullage lab measure calls' timed. Repeat it for more.", "FILE")
    ],
    out: Out,
    profiles: Annotated[Path | None, option("Steps that 'ullage lab measure steps' wrote.", "FILE")] = None,
    resume: Annotated[
        Path | None,
        option("Keep the followed steps in this file; steps already in it are not followed again.", "FILE.jsonl"),
    ] = None,
    trees: Annotated[int, option("Number of decision trees for call times.", "N", min=8)] = 1000,
    as_json: Json = False,
) -> None:
    """Fit the rates behind 'ullage.utilization': how long operator calls take, and how busy they keep a GPU.

    Every run is followed on the virtual GPU first, about a second each. Families that are kept for testing are left out
    of the fit, and it is judged on them.

    Examples:

      ullage lab train utilization --data runs.parquet --rates rates.jsonl --resume steps.jsonl --out rates.safetensors
      ullage lab evaluate utilization --data runs.parquet --weights rates.safetensors --resume steps.jsonl
    """
    from ullage.performance.rates import packed
    from ullage_lab.estimators.weights import write_weights
    from ullage_lab.train.protocol import read_rows
    from ullage_lab.train.steps import fitting, judging, runs

    check_file(out)
    with following("reading runs") as going:
        rows = [row for file in data for row in read_rows(file)]
        read = runs.read_alone(rows)
        profiled = [] if profiles is None else runs.profiled_runs(profiles)
        going.begin("following runs", len(read) + len(profiled))
        steps = runs.follow([*runs.configurations(rows, read), *profiled], resume, going.step)
        calls = runs.read_calls(rates) + ([] if profiles is None else runs.calls_in_steps(profiles, steps))
        measured = runs.with_work(read, steps)
        learn, test = ([run for run in measured if run.is_test is wanted] for wanted in (False, True))
        going.begin("fitting")
        made = fitting.fit(calls, learn, going.doing, trees, runs.calls_on_host(rates, profiles))
    write_weights(out, packed(made))
    lines = judging.lines_of(made, *(judging.of_one_host(part, made) for part in (learn, test)))
    print_utilization(lines, [], as_json)


@train.command()
def sharing(
    data: Annotated[
        list[Path], option("Sets of jobs that 'ullage lab measure together' wrote. Repeat it for more.", "FILE")
    ],
    out: Annotated[Path, option("Write the figures here.", "FILE.json")],
    as_json: Json = False,
) -> None:
    """Fit the model behind 'ullage share' to sets of jobs that were measured together.

    It has a handful of figures. Sets with a job of a family that is kept for testing are left out of the fit, and it is
    judged on them: by the jobs alone as they were measured, and as they are predicted.

    Examples:

      ullage lab train sharing --data benchmarks/data/together_h200.jsonl.gz --out sharing.json
    """
    from ullage_lab.train import sharing as model

    check_file(out)
    rows = model.read_rows(data)
    with following(
        "following jobs", len({row["alone"] for row in rows if "alone" in row and "failed" not in row})
    ) as going:
        steps = model.follow(rows, notify=going.step)
        alone = model.measured_alone(rows, steps)
        sets = model.sets_of(rows, alone)
        going.begin("fitting")
        rules = model.fit(sets, alone)
    model.save(rules, model.card_of(data, sets), out)
    predicted = model.predicted_alone(alone, steps)
    lines = model.lines_of(sets, alone, predicted, rules)
    spread = {
        inputs: model.loss_spread(sets, jobs, rules) for inputs, jobs in (("measured", alone), ("predicted", predicted))
    }
    if as_json:
        noise = {"noise": model.noise(rows), "noise_of_turns": model.noise_of_turns(rows)}
        print(json.dumps({"lines": [asdict(line) for line in lines], **noise, "loss_spread": spread}))
        return
    print_sharing(lines)
    for how, share in model.noise(rows).items():
        print(f"{how}: the same job, read alone twice, took {share:.1%} more or less time")
    print_noise_of_turns(model.noise_of_turns(rows))
    for inputs, ways in spread.items():
        for how, width in ways.items():
            print(f"{how}: jobs lose what is predicted times exp(±{width:.2f}), with jobs alone as {inputs}")


def check_family(family: str) -> None:
    if family not in FAMILIES:
        raise UnknownName("family", family, FAMILIES, hint="one of " + ", ".join(FAMILIES))


def _print_trained(result: Trained, out: Path) -> None:
    columns = {"accuracy": "accuracy", "precision": "precision", "recall": "recall", "F1": "f1"}
    columns |= {"too low": "under", "too high": "over"}
    parts = [(f"fold {number}", one) for number, one in enumerate(result.validation, 1)] + [("test", result.test)]
    print_rows(
        [
            {"part": name, "rows": str(one.rows)}
            | {head: f"{getattr(one, column):.3f}" for head, column in columns.items()}
            for name, one in parts
        ]
    )
    print(f"weights: {out} ({out.stat().st_size >> 10} KiB)")


@train.command()
def fast(
    data: Annotated[
        list[Path], option("Rows written by 'ullage lab data clean' (Parquet). Can be given more than once.", "FILE")
    ],
    out: Annotated[Path, option("Write the trees here.", "FILE.safetensors")],
    real: Annotated[
        Path | None, option("Real models measured by 'ullage measure' (JSONL), to learn from as well.", "FILE")
    ] = None,
    records: Annotated[
        Path | None,
        option("Write predictions for held-out model families here, for 'ullage lab evaluate --resume'.", "FILE"),
    ] = None,
    seed: Seed = 1,
    as_json: Json = False,
) -> None:
    """Train fast: a closed formula over totals, corrected by trees, with a 99% bound calibrated on unseen jobs.

    Examples:

      ullage lab train fast --data h200.parquet --real benchmarks/data/h200_runs.jsonl.gz --out fast.safetensors
    """
    from ullage_lab.estimators.fast.estimator import save
    from ullage_lab.train.fast import FOLDS, jobs_of, read_real, train_fast, write_records
    from ullage_lab.train.protocol import read_rows

    for file in (out, records):
        check_file(file)
    with following(f"reading {data[0].name}") as going:
        rows = [row for file in data for row in read_rows(file)]
        known: list[dict[str, Any]] = []
        if real is not None:
            known = read_real(real, going.begin, going.step)
        going.begin("trees", FOLDS + 1)
        model, unseen = train_fast(jobs_of(rows, known), gpu=str(rows[0].get("gpu")), seed=seed, begin=going.step)
    save(model, out)
    if records is not None:
        write_records(records, known, unseen, len(rows), str(rows[0].get("gpu")))
    if as_json:
        print(json.dumps({"out": str(out), "card": model.card, "shift": model.shift}))
        return
    _print_fast(model.card, out)


def _print_fast(card: dict[str, Any], out: Path) -> None:
    columns = {"median error": "median", "mean": "mean", "too low": "under", "below bound": "covered"}
    columns |= {"bound above": "bound_above", "formula alone": "formula_median"}
    rows = [
        {"jobs": name, "count": str(card[name]["jobs"])}
        | {head: f"{card[name][column]:.1%}" for head, column in columns.items()}
        for name in ("generated", "real")
        if card[name]
    ]
    print_rows(rows, give_way=("formula alone", "mean"))
    print("reserved memory; every job judged by trees that had not seen its group (a family of real models)")
    print(f"trees: {out} ({out.stat().st_size >> 10} KiB)")


@train.command()
def dnnperf(
    data: Annotated[Path, option("Real models measured by 'ullage measure' (JSONL, also .gz).", "FILE")],
    out: Out,
    epochs: Annotated[int, option("Epochs.", "N", min=1)] = 24,
    folds: Annotated[int, option("Number of folds of model families.", "N", min=2)] = 5,
) -> None:
    """Train DNNPerf: a graph network over the operators of a training step, for memory and step time.

    Cross-validates on folds of whole model families, trains on all runs and prints the figures as JSON.

    Examples:

      ullage lab train dnnperf --data benchmarks/data/h200_runs.jsonl.gz --out dnnperf.safetensors
    """
    from ullage_lab.train.dnnperf import samples, save, trained

    check_file(out)
    with following(f"reading {data.name}") as going:
        graphs = samples(data, going.step)
        going.begin("training", folds + 1)
        network, card = trained(graphs, data.name, folds, epochs, going.step)
    save(network, out, card)
    print(json.dumps(card, indent=2))


@train.command()
def convolutions(
    measured: Annotated[list[Path], argument("Files of 'ullage measure cudnn'.", "FILE")],
    out: Annotated[Path | None, option("Write the table and the trees into this folder.", "FOLDER")] = None,
    describe: Annotated[
        str | None, option("Measured device, as JSON: gpu, compute_capability, multiprocessors, versions.", "JSON")
    ] = None,
    trees: Annotated[int, option("Number of decision trees.", "N", min=1)] = 3,
    leaves: Annotated[int, option("Maximum number of leaves in a tree.", "N", min=2)] = 12_000,
    held_out: Annotated[
        bool,
        option(
            "Fit without every seventh layer, or with --trials family of layers, and print how well those are "
            "predicted.",
            "--held-out",
        ),
    ] = False,
    trials: Annotated[
        bool, option("Fit the plans that cudnn.benchmark tries, instead of cuDNN's default choice.", "--trials")
    ] = False,
    add: Annotated[bool, option("With --trials: add trees to those in the folder.", "--add")] = False,
) -> None:
    """Fit the table and the trees of cuDNN's workspaces to cuDNN's answers.

    Needs scikit-learn.

    Examples:

      ullage lab train convolutions plans.jsonl --out tables --describe '{"gpu": "NVIDIA H200"}'
      ullage lab train convolutions plans.jsonl --held-out
      ullage lab train convolutions plans.jsonl --trials --out tables --describe '{"gpu": "NVIDIA H200"}'
    """
    from ullage.virtual.cudnn.workspaces import TRIAL_TREES
    from ullage_lab.train import trials as tried
    from ullage_lab.train import workspaces as table

    described = _described(describe)
    if add and (out is None or not trials or held_out):
        raise InvalidValue("--add needs --trials and --out")
    if add and out is not None and not (out / TRIAL_TREES).is_file():
        raise InvalidValue(f"--add needs a folder with {TRIAL_TREES}, as --trials without --add writes it, got {out}")
    if not held_out and (out is None or (described is None and not add)):
        raise InvalidValue("give --out and --describe, or --held-out")
    answers: dict[Any, Any] = {}
    for path in measured:
        if not path.is_file():
            raise InvalidValue(f"cannot read {path}: no such file")
        answers |= tried.asked_problems(path) if trials else table.chosen_workspaces(path)
    if not answers:
        raise InvalidValue(f"no convolution that cuDNN answered in {', '.join(map(str, measured))}")
    if held_out:
        (tried.evaluate_held_out if trials else table.evaluate_held_out)(answers, trees, leaves, print)
    elif add and out is not None:
        tried.add_trees(answers, out, trees, leaves, print)
    elif out is not None and described is not None:
        (tried.write_fit if trials else table.write_fit)(answers, out, described, trees, leaves, print)


def _described(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidValue(f"--describe must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidValue('--describe must be a JSON object, such as \'{"gpu": "NVIDIA H200"}\'')
    return value
