"""Shell completion for names of models, GPUs, optimizers and precisions, without importing PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

REPORT_KEYS = ("user", "day", "name", "gpu")
_MOST_FILES = 100  # that are looked into
FAMILIES, ARCHITECTURES = ("mlp", "cnn", "transformer"), ("mlp", "transformer")


def sources(incomplete: str) -> list[str]:
    """Models of the source that was typed, the sources themselves, and scripts in this folder.

    >>> sources("torchv")
    ['torchvision:']
    """
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
    found = [prefix for prefix in prefixes if prefix.startswith(incomplete)]
    return found + sorted(str(file) for file in Path().glob(f"{incomplete}*.py"))


def measurable(incomplete: str) -> list[str]:
    """What `ullage measure` takes: the words for other things than runs, scripts and lists of runs in this folder.

    >>> measurable("cud")
    ['cudnn']
    """
    words = [word for word in ("context", "cudnn", "rates", "together") if word.startswith(incomplete)]
    return words + sorted(str(file) for kind in ("py", "jsonl") for file in Path().glob(f"{incomplete}*.{kind}"))


def gpu_architectures(incomplete: str) -> list[str]:
    """GPU architectures, the last of several that stand between commas, and the word for all.

    >>> gpu_architectures("sm_80,sm_8")
    ['sm_80,sm_80', 'sm_80,sm_86', 'sm_80,sm_89']
    """
    from ullage.hardware.catalogue import ARCHITECTURE_CARDS

    found = _one_more(incomplete, lambda begun: [name for name in ARCHITECTURE_CARDS if name.startswith(begun)])
    return ["all", *found] if "all".startswith(incomplete) else found


def ways_of_sharing(incomplete: str) -> list[str]:
    """Ways in which jobs share a GPU, the last of several that stand between commas.

    >>> ways_of_sharing("timeslice,m")
    ['timeslice,mps']
    """
    return _one_more(incomplete, lambda begun: [way for way in ("timeslice", "mps") if way.startswith(begun)])


def ways_to_share(incomplete: str) -> list[str]:
    """Ways in which `ullage share` lets jobs share a GPU, after those that were named already, and the word for all.

    >>> ways_to_share("mps,mi"), ways_to_share("a")
    (['mps,mig'], ['all'])
    """
    found = _one_more(incomplete, lambda begun: [way for way in _hows() if way.startswith(begun)])
    return ["all", *found] if "all".startswith(incomplete) else found


def gpus(incomplete: str) -> list[str]:
    """GPUs in the catalogue.

    >>> gpus("h200")[0]
    'H200'
    """
    from ullage.hardware import gpus as all_gpus

    return [card.name for card in all_gpus() if card.name.casefold().startswith(incomplete.casefold())]


def several_gpus(incomplete: str) -> list[str]:
    """GPUs in the catalogue, after those that were named already, and the word for all.

    >>> several_gpus("T4,h200")[0], several_gpus("al")
    ('T4,H200', ['all'])
    """
    found = _one_more(incomplete, gpus)
    return ["all", *found] if "all".startswith(incomplete) else found


def parallel(incomplete: str) -> list[tuple[str, str]]:
    """Ways to spread a model over ranks.

    >>> [name for name, _ in parallel("f")]
    ['fsdp2']
    """
    from ullage.jobs.parallel import PARALLEL

    return [(name, words) for name, words in PARALLEL.items() if name.startswith(incomplete)]


def several_parallel(incomplete: str) -> list[str]:
    """Ways to spread a model, after those that were named already.

    >>> several_parallel("tp,d")
    ['tp,ddp']
    """
    return _one_more(incomplete, lambda begun: [name for name, _ in parallel(begun)])


def clusters(incomplete: str) -> list[str]:
    """GPUs in the catalogue, after how many there are, and on how many machines.

    >>> clusters("1..64xh20")[:2], clusters("2x8xT")[0]
    (['1..64xH20', '1..64xH200'], '2x8xT4')
    """
    found = re.fullmatch(r"((?:[0-9.]+x)+)(.*)", incomplete)
    return [f"{found[1]}{name}" for name in gpus(found[2])] if found else ["1..8x", "1..64x", "8x", "2x8x"]


def interconnects(incomplete: str) -> list[str]:
    """Networks between GPUs, after one that was named already.

    >>> interconnects("nvlink4,ib-n")
    ['nvlink4,ib-ndr']
    """
    from ullage.hardware.networks import NETWORKS

    return _one_more(incomplete, lambda begun: [name for name in NETWORKS if name.startswith(begun)])


def _one_more(incomplete: str, complete: Callable[[str], list[str]]) -> list[str]:
    """The names that complete the last one of a list with commas, each with those before it."""
    before, comma, begun = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in complete(begun)]


def releases(incomplete: str) -> list[str]:
    """Releases of PyTorch.

    >>> releases("2.1")
    ['2.10', '2.11', '2.12', '2.13', '2.14', '2.15']
    """
    from ullage.virtual.releases import RELEASES

    return [release.name for release in RELEASES if release.name.startswith(incomplete)]


def estimators(incomplete: str) -> list[str]:
    """Estimators by their names.

    >>> estimators("fake")
    ['faketensor', 'faketensor+margin']
    """
    from ullage.estimation.estimators.registry import estimators as all_estimators

    return [name for name in all_estimators() if name.startswith(incomplete)]


def several_estimators(incomplete: str) -> list[str]:
    """Estimators, after those that were named already, and the word for all.

    >>> several_estimators("horus,veri"), several_estimators("al")
    (['horus,veritasest'], ['all'])
    """
    found = _one_more(incomplete, estimators)
    return ["all", *found] if "all".startswith(incomplete) else found


def drawn_families(incomplete: str) -> list[str]:
    """What `ullage lab draw dataset` draws.

    >>> drawn_families("r")
    ['real']
    """
    return [name for name in (*FAMILIES, "real") if name.startswith(incomplete)]


def families(incomplete: str) -> list[str]:
    """Families of generated models.

    >>> families("c")
    ['cnn']
    """
    return [name for name in FAMILIES if name.startswith(incomplete)]


def architectures(incomplete: str) -> list[str]:
    """Networks of learned estimators.

    >>> architectures("t")
    ['transformer']
    """
    return [name for name in ARCHITECTURES if name.startswith(incomplete)]


def pythons(incomplete: str) -> list[str]:
    """Environments in the folder that was typed so far, and those that conda knows by name.

    >>> pythons("/no/such/folder/")
    []
    """
    import os

    from ullage.sandbox.conda import conda_names

    typed = Path(incomplete)
    folder, begun = (typed, "") if incomplete.endswith("/") else (typed.parent, typed.name)
    found = sorted(str(python.parents[1]) for python in folder.glob(f"{begun}*/bin/python"))
    return found + [name for name in conda_names(os.environ) if name.startswith(incomplete)]


def policies(incomplete: str) -> list[str]:
    """Placement policies by their names, and functions in the Python files of the folder that was typed so far.

    >>> policies("mag")
    ['magm']
    """
    from ullage.manager.placement.policies import policies as all_policies

    named = [name for name in all_policies() if name.startswith(incomplete)]
    folder, slash, begun = incomplete.partition(":")[0].rpartition("/")
    files = sorted(Path(folder or slash or ".").glob(f"{begun.removesuffix('.py')}*.py"))
    own = [f"{folder}{slash}{file.name}:{name}" for file in files[:_MOST_FILES] for name in _functions_of_three(file)]
    return named + [each for each in own if each.startswith(incomplete)]


def _functions_of_three(file: Path) -> list[str]:
    """The functions of a file that take three arguments, as a policy does. The file is read, not run."""
    import ast

    try:
        found = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return []
    functions = [each for each in found if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
    return [each.name for each in functions if len(each.args.args) == 3]


def several_policies(incomplete: str) -> list[str]:
    """Placement policies, after those that were named already.

    >>> several_policies("lug,mag")
    ['lug,magm']
    """
    return _one_more(incomplete, policies)


def promising_estimators(incomplete: str) -> list[str]:
    """What a simulation can promise jobs by: estimators, true memory, nothing; the last of several between commas.

    >>> promising_estimators("none,ora")
    ['none,oracle']
    """
    words = ("oracle", "none")
    return _one_more(
        incomplete, lambda begun: [*estimators(begun), *(word for word in words if word.startswith(begun))]
    )


def simulated_sharing(incomplete: str) -> list[str]:
    """Ways in which jobs share a simulated GPU, the last of several that stand between commas.

    >>> simulated_sharing("mps,o")
    ['mps,off']
    """
    return _one_more(incomplete, lambda begun: [way for way in (*_hows(), "off") if way.startswith(begun)])


def _hows() -> list[str]:
    from ullage.performance.sharing import HOWS

    return [*HOWS]


def counted_gpus(incomplete: str) -> list[str]:
    """GPUs in the catalogue, after how many there are: "4xA100-40GB".

    >>> counted_gpus("4xh200")[0]
    '4xH200'
    """
    count, times, name = incomplete.partition("x")
    begun = f"{count}{times}" if times and count.replace(".", "").replace(":", "").isdigit() else ""
    return [f"{begun}{card}" for card in gpus(name if begun else incomplete)]


def parts_of_world(incomplete: str) -> list[str]:
    """Parts of a simulated world that can be switched off, and the word for all.

    >>> parts_of_world("startup,inter")
    ['startup,interference']
    """
    from ullage.manager.simulation.scenario import PARTS_OF_WORLD

    return _one_more(incomplete, lambda begun: [name for name in (*PARTS_OF_WORLD, "all") if name.startswith(begun)])


def targets(incomplete: str) -> list[str]:
    """Figures that a target can be about.

    >>> targets("wait")
    ['waiting<=', 'waiting-p95<=']
    """
    from ullage.manager.simulation.measures import MEASURES

    return [f"{name}<=" for name in MEASURES if name.startswith(incomplete)]


def trace_formats(incomplete: str) -> list[str]:
    """Forms of traces.

    >>> trace_formats("car")
    ['carma']
    """
    from ullage.manager.simulation.reading import FORMATS

    return [name for name in FORMATS if name.startswith(incomplete)]


def jobs(incomplete: str) -> list[tuple[str, str]]:
    """Unfinished jobs of the running daemon by number, each with its name and state."""
    return _jobs(incomplete, over=False)


def jobs_to_requeue(incomplete: str) -> list[tuple[str, str]]:
    """The latest jobs that are over, and the unfinished ones."""
    return _jobs(incomplete, over=True)


def _jobs(incomplete: str, over: bool) -> list[tuple[str, str]]:
    from ullage.errors import UllageError

    try:
        from ullage.manager.client import Client

        client = Client(timeout=1.0)
        past = [job | {"jobs": 1} for job in client.history()] if over else []
        found = past + client.folded_queue(limit=1000)["rows"]
    except UllageError:
        return []
    from ullage.manager.job_words import reference

    named = [(reference(job) if job["jobs"] > 1 else str(job["id"]), job) for job in found]
    return [(name, f"{job['name']}, {job['state']}") for name, job in named if name.startswith(incomplete)]


def columns(incomplete: str) -> list[str]:
    """Columns of tables of jobs, after those that were named already.

    >>> columns("id,sta")
    ['id,state', 'id,started']
    """
    from ullage.cli.job_tables import COLUMNS

    return _one_more(incomplete, lambda begun: [name for name in COLUMNS if name.startswith(begun)])


def report_keys(incomplete: str) -> list[str]:
    """What the rows of a report are for.

    >>> report_keys("user,d")
    ['user,day']
    """
    return _one_more(incomplete, lambda begun: [key for key in REPORT_KEYS if key.startswith(begun)])


def cards(incomplete: str) -> list[tuple[str, str]]:
    """GPUs of the running daemon by index, each with its name."""
    from ullage.errors import UllageError

    try:
        from ullage.manager.client import Client

        found = Client(timeout=1.0).gpus()
    except UllageError:
        return []
    return [(str(card["index"]), card["name"]) for card in found if str(card["index"]).startswith(incomplete)]


def tokens(incomplete: str) -> list[tuple[str, str]]:
    """Tokens of the running daemon by number, each with its name."""
    from ullage.errors import UllageError

    try:
        from ullage.manager.client import Client

        found = Client(timeout=1.0).tokens()
    except UllageError:
        return []
    return [(str(each["id"]), each["name"]) for each in found if str(each["id"]).startswith(incomplete)]


def reservations(incomplete: str) -> list[tuple[str, str]]:
    """Reservations of the running daemon by number, each with its name."""
    from ullage.errors import UllageError

    try:
        from ullage.manager.client import Client

        found = Client(timeout=1.0).reservations()
    except UllageError:
        return []
    return [(str(each["id"]), each["name"]) for each in found if str(each["id"]).startswith(incomplete)]


def optimizers(incomplete: str) -> list[str]:
    """Optimizers with a short name.

    >>> optimizers("adamw")
    ['adamw', 'adamw_fused']
    """
    from ullage.jobs.optimizers import OPTIMIZERS

    return [name for name in OPTIMIZERS if name.startswith(incomplete)]


def precisions(incomplete: str) -> list[tuple[str, str]]:
    """Precisions and their meanings."""
    from ullage.jobs.configuration import PRECISIONS

    return [(name, precision.meaning) for name, precision in PRECISIONS.items() if name.startswith(incomplete)]


def dtypes(incomplete: str) -> list[str]:
    """Types that weights are loaded in.

    >>> dtypes("b")
    ['bfloat16']
    """
    from ullage.jobs.configuration import DTYPES

    return [name for name in DTYPES if name.startswith(incomplete)]


def quantizations(incomplete: str) -> list[tuple[str, str]]:
    """Kinds of quantized weights and their meanings."""
    from ullage.jobs.configuration import QUANTIZATIONS

    return [(name, meaning) for name, meaning in QUANTIZATIONS.items() if name.startswith(incomplete)]


def attentions(incomplete: str) -> list[tuple[str, str]]:
    """Kinds of attention and their meanings."""
    from ullage.jobs.configuration import ATTENTIONS

    return [(name, meaning) for name, meaning in ATTENTIONS.items() if name.startswith(incomplete)]
