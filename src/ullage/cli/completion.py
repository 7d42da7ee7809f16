"""Shell completion for names of models, GPUs, optimizers and precisions, without importing PyTorch."""

import importlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.errors import UllageError

if TYPE_CHECKING:
    from ullage.manager.client import Client

Completions = list[str] | list[tuple[str, str]]
Completer = Callable[[str], Completions]

REPORT_KEYS = ("user", "day", "name", "gpu")
_MOST_FILES = 100  # most files to read
FAMILIES, ARCHITECTURES = ("mlp", "cnn", "transformer"), ("mlp", "transformer")
ALL = "all"


def completer(names: str | Iterable[str], *more: str, several: bool = False, alone: str = "") -> Completer:
    """Return a completer of names, of the last of several names with commas, or of the single word `alone`.

    Names that are keys of a table show its texts. A text such as "ullage.hardware:gpus" is imported on completion.

    >>> completer(["mps", "mig", "time-slicing"], several=True, alone="all")("mps,m")
    ['mps,mps', 'mps,mig']
    """

    def complete(incomplete: str) -> Completions:
        before, comma, begun = incomplete.rpartition(",") if several else ("", "", incomplete)
        known = _imported(names) if isinstance(names, str) else names
        matching = [name for name in [*_names(known), *more] if name.casefold().startswith(begun.casefold())]
        if not several and (meanings := _meanings(known)):
            return [(name, meanings[name]) for name in matching]
        return [alone] * bool(alone and alone.startswith(incomplete)) + [f"{before}{comma}{name}" for name in matching]

    return complete


def _names(known: Iterable[Any]) -> list[str]:
    return [getattr(each, "name", each) for each in known]


def _meanings(known: Any) -> dict[str, str]:
    values: Iterable[tuple[str, Any]] = known.items() if isinstance(known, Mapping) else ()
    texts: dict[str, Any] = {name: getattr(value, "meaning", value) for name, value in values}
    return texts if all(isinstance(text, str) for text in texts.values()) else {}


def _imported(home: str) -> Any:
    module, _, name = home.partition(":")
    value = getattr(importlib.import_module(module), name)
    return value() if callable(value) else value


_GPUS, _ESTIMATORS = "ullage.hardware:gpus", "ullage.estimation.estimators.registry:estimators"
_PARALLEL, _SHARING = "ullage.jobs.parallel:PARALLEL", "ullage.performance.sharing:HOWS"

gpus, several_gpus = completer(_GPUS), completer(_GPUS, several=True, alone=ALL)
gpu_architectures = completer("ullage.hardware.catalogue:ARCHITECTURE_CARDS", several=True, alone=ALL)
parallel, several_parallel = completer(_PARALLEL), completer(_PARALLEL, several=True)
interconnects = completer("ullage.performance.networks:NETWORKS", several=True)
releases = completer("ullage.virtual.releases:RELEASES")
estimators, several_estimators = completer(_ESTIMATORS), completer(_ESTIMATORS, several=True, alone=ALL)
promising_estimators = completer(_ESTIMATORS, "oracle", "none", several=True)
ways_of_sharing = completer(["mps", "time-slicing"], several=True)
ways_to_share = completer(["mps", "time-slicing", "mig"], several=True, alone=ALL)
simulated_sharing = completer(_SHARING, "off", several=True)
parts_of_world = completer("ullage.manager.simulation.scenario:PARTS_OF_WORLD", ALL, several=True)
trace_formats = completer("ullage.manager.simulation.reading:FORMATS")
columns = completer("ullage.cli.job_tables:COLUMNS", several=True)
report_keys = completer(REPORT_KEYS, several=True)
drawn_families, families, architectures = completer(FAMILIES, "real"), completer(FAMILIES), completer(ARCHITECTURES)
optimizers = completer("ullage.jobs.optimizers:OPTIMIZERS")
precisions = completer("ullage.jobs.model:PRECISIONS")
quantizations = completer("ullage.jobs.model:QUANTIZATIONS")


def targets(incomplete: str) -> list[str]:
    """Complete the figures of a simulation that a target can limit, such as "waiting<="."""
    from ullage.manager.simulation.measures import MEASURES

    return [f"{name}<=" for name in MEASURES if name.startswith(incomplete)]


# Arguments other than single names.


def sources(incomplete: str) -> list[str]:
    """Return the models of the typed source, the names of all sources, and the scripts in this folder."""
    from ullage.jobs.sources.names import model_names

    source, colon, name = incomplete.partition(":")
    if colon:
        known = {"tv": "torchvision"}.get(source, source)
        names = model_names(known) if known in ("torchvision", "timm", "hf") else ()
        if known == "hf":
            from ullage.jobs.sources.hub import cached_ids

            names = (*cached_ids(), *names)
        return [f"{source}:{model}" for model in names if model.startswith(name)]
    prefixes = [f"{known}:" for known in ("torchvision", "timm", "hf")]
    return [prefix for prefix in prefixes if prefix.startswith(incomplete)] + _files(incomplete, "py")


def measurable(incomplete: str) -> list[str]:
    """Complete the argument of `ullage measure`: its words, and scripts and lists of runs in this folder."""
    words = [word for word in ("context", "cudnn") if word.startswith(incomplete)]
    return words + _files(incomplete, "py") + _files(incomplete, "jsonl")


def _files(incomplete: str, kind: str) -> list[str]:
    return sorted(str(file) for file in Path().glob(f"{incomplete}*.{kind}"))


def clusters(incomplete: str) -> Completions:
    """Complete GPUs of the catalogue after the numbers of machines and GPUs."""
    match = re.fullmatch(r"((?:[0-9.]+x)+)(.*)", incomplete)
    return [f"{match[1]}{name}" for name in gpus(match[2])] if match else ["1..8x", "1..64x", "8x", "2x8x"]


def counted_gpus(incomplete: str) -> Completions:
    """Complete GPUs of the catalogue after their number: "4xA100-40GB"."""
    count, times, name = incomplete.partition("x")
    begun = f"{count}{times}" if times and count.replace(".", "").replace(":", "").isdigit() else ""
    return [f"{begun}{card}" for card in gpus(name if begun else incomplete)]


def pythons(incomplete: str) -> list[str]:
    """Complete environments in the typed folder, and conda environments by name."""
    from ullage.sandbox.conda import conda_names

    typed = Path(incomplete)
    folder, begun = (typed, "") if incomplete.endswith("/") else (typed.parent, typed.name)
    environments = sorted(str(python.parents[1]) for python in folder.glob(f"{begun}*/bin/python"))
    return environments + [name for name in conda_names(os.environ) if name.startswith(incomplete)]


def policies(incomplete: str) -> list[str]:
    """Complete placement policies by name, and functions in Python files of the typed folder."""
    from ullage.manager.placement.policies import policies as all_policies

    named = [name for name in all_policies() if name.startswith(incomplete)]
    folder, slash, begun = incomplete.partition(":")[0].rpartition("/")
    files = sorted(Path(folder or slash or ".").glob(f"{begun.removesuffix('.py')}*.py"))
    own = [f"{folder}{slash}{file.name}:{name}" for file in files[:_MOST_FILES] for name in _functions_of_three(file)]
    return named + [each for each in own if each.startswith(incomplete)]


def _functions_of_three(file: Path) -> list[str]:
    """Return the functions of a file that take three arguments, as a policy does. The file is read, not run."""
    import ast

    try:
        statements = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return []
    functions = [each for each in statements if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
    return [each.name for each in functions if len(each.args.args) == 3]


def several_policies(incomplete: str) -> list[str]:
    """Complete the last of several placement policies."""
    before, comma, begun = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in policies(begun)]


# Names that the running daemon knows.


def of_daemon(ask: "Callable[[Client], Mapping[str, str]]") -> Completer:
    """Return a completer of the daemon's answers, or of nothing if no daemon runs."""

    def complete(incomplete: str) -> Completions:
        try:
            from ullage.manager.client import Client

            return completer(ask(Client(timeout=1.0)))(incomplete)
        except UllageError:
            return []

    return complete


def _unfinished(client: "Client") -> dict[str, str]:
    from ullage.manager.job_words import reference

    rows = client.folded_queue(limit=1000)["rows"]
    return {reference(job) if job["jobs"] > 1 else str(job["id"]): f"{job['name']}, {job['state']}" for job in rows}


def _latest(client: "Client") -> dict[str, str]:
    over = {str(job["id"]): f"{job['name']}, {job['state']}" for job in client.history()}
    return over | _unfinished(client)


jobs, jobs_to_requeue = of_daemon(_unfinished), of_daemon(_latest)
cards = of_daemon(lambda client: {str(card["index"]): card["name"] for card in client.gpus()})
tokens = of_daemon(lambda client: {str(each["id"]): each["name"] for each in client.tokens()})
