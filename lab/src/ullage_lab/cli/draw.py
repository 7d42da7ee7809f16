"""`ullage lab draw`: lists of runs to measure. Needs no GPU."""

import json
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from ullage.cli import completion
from ullage.cli.measured_files import check_file
from ullage.cli.options import Json, Seed, command_group, option
from ullage.cli.progress import each
from ullage.errors import InvalidValue
from ullage.units import format_bytes, parse_bytes, parse_duration

draw = command_group("Draw lists of runs, convolutions and jobs to measure.")


@draw.command()
def models(
    count: Annotated[int, option("Number of runs to draw.", "N", min=1)] = 100,
    seed: Seed = 0,
    avoid: Annotated[Path | None, option("File with models to exclude.", "FILE")] = None,
) -> None:
    """Print training runs of torchvision's, timm's and transformers' models, and of perceptrons, for 'ullage measure'.

    Examples:

      ullage lab draw models --count 200 --seed 7 > runs.jsonl
    """
    from ullage.jobs import read_rows
    from ullage_lab.draw.configurations import draw

    known = {str(row.get("model")) for row in read_rows(avoid)} if avoid else set()
    for row in draw(count, seed, known):
        print(json.dumps(row))


@draw.command()
def problems(
    random: Annotated[int, option("Draw this many convolutions.", "--random N", min=0)] = 0,
    models: Annotated[
        str | None, option("Collect layers of torchvision's and timm's models for this long.", "TIME")
    ] = None,
    configurations: Annotated[
        int, option("Combinations of layer, batch size, type and layout, with --models.", "N", min=1)
    ] = 10_000,
    seed: Seed = 0,
) -> None:
    """Print convolution problems for 'ullage measure cudnn'. Needs no GPU.

    Half of the random ones are like layers of models. Those of models come from a run on PyTorch's "meta" device. Their
    order is random, and common ones tend to come first: ask about as many as there is time for.

    Examples:

      ullage lab draw problems --random 1000 > problems.jsonl
      ullage lab draw problems --models 15m --configurations 200000 > problems.jsonl
    """
    from ullage_lab.draw.convolutions import problems_of_models, random_problems

    if not random and models is None:
        raise InvalidValue("give --random N or --models TIME")
    of_models = [] if models is None else problems_of_models(parse_duration(models), configurations)
    for problem in [*of_models, *random_problems(random, seed)]:
        print(json.dumps({"problem": problem}))


@draw.command()
def dataset(
    family: Annotated[
        str, option("The family of models: mlp, cnn, transformer or real.", "NAME", complete=completion.drawn_families)
    ],
    count: Annotated[int, option("Number of runs to draw.", "N", min=1)] = 1000,
    seed: Seed = 0,
    out: Annotated[Path | None, option("Write the runs to this file.", "FILE.jsonl", default="FAMILY.jsonl")] = None,
    ranges: Annotated[Path | None, option("A file with your own ranges, by family.", "FILE.toml")] = None,
    max_memory: Annotated[str, option("Maximum memory of a run, roughly estimated.", "SIZE")] = "40GiB",
    max_step: Annotated[str, option("Maximum time of a step, roughly estimated.", "TIME")] = "120ms",
    min_step: Annotated[
        str,
        option(
            "Minimum time of a step, roughly estimated. Real models that are too small get the largest allowed batch.",
            "TIME",
        ),
    ] = "0s",
    as_json: Json = False,
) -> None:
    """Draw training runs of generated models (mlp, cnn or transformer) or of real ones (real).

    Real models are those of torchvision, timm and transformers, with random weights, from about fifty families; their
    packages must be installed. The same seed gives the same runs, and a larger count begins with the same ones. Each
    line is a configuration that 'ullage lab measure dataset', 'ullage measure', 'ullage estimate' and 'ullage evaluate'
    take.

    Examples:

      ullage lab draw dataset --family cnn --count 3000 --seed 1 --out cnn.jsonl
      ullage lab draw dataset --family real --count 400 --seed 3 --max-memory 16GiB --max-step 80ms --out real.jsonl
      ullage lab draw dataset --family real --count 200 --min-step 18ms --max-step 60ms --out busy.jsonl
      ullage lab draw dataset --family mlp --count 100 --seed 2 --ranges ranges.toml --max-memory 8GiB --out small.jsonl
    """
    from ullage_lab.draw.generated import DrawingLimits, draw, summary
    from ullage_lab.draw.generated import ranges as known_ranges
    from ullage_lab.draw.real import FAMILY, draw_real

    if family == FAMILY and ranges is not None:
        raise InvalidValue("--ranges is for generated models; leave it away for real ones")
    known = {} if family == FAMILY else known_ranges(family, ranges)
    file = out or Path(f"{family}.jsonl")
    check_file(file)  # first, since drawing thousands takes a minute
    limits = DrawingLimits(parse_bytes(max_memory), parse_duration(max_step), parse_duration(min_step))
    rows = [
        draw_real(number, seed, limits) if family == FAMILY else draw(family, number, seed, known, limits)
        for number in each(range(count), "drawing", count)
    ]
    try:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise InvalidValue(f"cannot write {file}: {error.strerror}") from None
    report = {"family": family, "seed": seed, "file": str(file), **summary(rows)}
    if as_json:
        print(json.dumps(report))
        return
    Console().print(_generate_table(report))


def _generate_table(report: dict[str, Any]) -> Table:
    of = "real models" if report["family"] == "real" else f"generated {report['family']}s"
    table = Table(title=f"{report['rows']} runs of {of}, seed {report['seed']}: {report['file']}")
    table.add_column("")
    table.add_column("")
    sizes = (format_bytes(report[name]) for name in ("smallest", "median", "largest"))
    table.add_row("memory, by counting", "{} to {} (half of them) to {}".format(*sizes))
    unit = report["class_bytes"]
    classes = (f"{format_bytes(unit * number)} up: {count}" for number, count in report["classes"].items())
    table.add_row("classes of " + format_bytes(unit), ", ".join(classes))
    for name, title in (("arch", "forms"), ("opt", "optimizers"), ("precision", "precisions")):
        table.add_row(title, ", ".join(f"{word} {count}" for word, count in report[name].items()))
    return table
