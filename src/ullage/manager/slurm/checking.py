"""Reads a site's slurm.conf and gres.conf, and says what is missing so that jobs share GPUs by memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ullage.errors import InvalidValue, SlurmFailed, UnknownName
from ullage.hardware import GPU
from ullage.hardware import gpu as find_gpu
from ullage.manager.slurm import commands
from ullage.manager.slurm.commands import parse_gres
from ullage.manager.slurm.configuration import LUA
from ullage.manager.slurm.site import SITE_FILE, SiteFile, gives_gpus_twice, read_site_file
from ullage.units import GIB

_DEEPEST = 5  # files that include each other


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: whether it is as it should be, and in words what was found and what to write. What
    is only to be known is neither (`None`)."""

    good: bool | None
    text: str


Line = dict[str, str]  # the settings of one line, names in lower case


def read_lines(path: Path, depth: int = 0) -> Iterator[Line]:
    """The lines of a configuration file of Slurm, with those of files that it includes."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror}") from None
    for line in re.sub(r"\\\n", " ", text).splitlines():
        line = re.sub(r"(?<!\\)#.*", "", line).strip()
        include = re.fullmatch(r"include\s+(\S+)", line, re.I)
        if include and depth < _DEEPEST:
            yield from read_lines(path.parent / include[1], depth + 1)
        elif line:
            pairs = re.findall(r'(\w+)=("[^"]*"|\S+)', line)
            yield {name.lower(): value.strip('"') for name, value in pairs}


def check(path: Path) -> list[Finding]:
    """Look through a slurm.conf and what lies beside it."""
    lines = list(read_lines(path))
    settings = {name: value for line in lines if "nodename" not in line for name, value in line.items()}
    site = read_site_file(path.parent / SITE_FILE)
    found = [_types(settings), _select(settings)]
    nodes = [line for line in lines if "nodename" in line]
    with_gpus = [line for line in nodes if any(each.name == "gpu" for each in parse_gres(line.get("gres", "")))]
    if not with_gpus:
        found.append(Finding(False, "no node has GPUs: needed NodeName=... Gres=gpu:TYPE:COUNT,shard:COUNT"))
    found += [_node(line, site) for line in with_gpus]
    found += [_gres_conf(path.parent / "gres.conf", with_gpus)] if with_gpus else []
    found += [_plugin(settings, name, path.parent / file) for name, file in LUA.items()]
    if site.sharing == "mps":
        found += [_script(settings, name) for name in ("Prolog", "Epilog", "TaskProlog")]
    found.append(_requeue(settings))
    return found + _whole_gpus(with_gpus)


def _whole_gpus(nodes: list[Line]) -> list[Finding]:
    """What is to be known where a node has shards and several GPUs."""
    counts: dict[str, Counter[str]] = {line["nodename"]: Counter() for line in nodes}
    for line in nodes:
        for each in parse_gres(line["gres"]):
            counts[line["nodename"]][each.name] += each.count
    names = [name for name, count in counts.items() if count["gpu"] > 1 and count["shard"]]
    without = [name for name, count in counts.items() if not count["shard"]]
    if not names or without or not _may_be_old():
        return []
    text = (
        f"nodes {', '.join(names)}: Slurm before 23.11.5 gives GPUs of which jobs have shards to jobs that ask for "
        "GPUs; keep nodes without shards for jobs of several GPUs, in a partition of their own"
    )
    return [Finding(None, text)]


def _may_be_old() -> bool:
    """Whether the Slurm here counts GPUs wrongly; one that cannot be asked may."""
    try:
        return gives_gpus_twice(commands.version())
    except SlurmFailed:
        return True


def _types(settings: Line) -> Finding:
    given = settings.get("grestypes", "")
    missing = [name for name in ("gpu", "shard") if name not in given.split(",")]
    if missing:
        wanted = ",".join([*filter(None, given.split(",")), *missing])
        return Finding(False, f"GresTypes={given}: needed GresTypes={wanted}")
    return Finding(True, f"GresTypes={given}")


def _select(settings: Line) -> Finding:
    given = settings.get("selecttype", "")
    good = given == "select/cons_tres"
    return Finding(good, f"SelectType={given}" + ("" if good else ": needed SelectType=select/cons_tres"))


def _node(line: Line, site: SiteFile) -> Finding:
    gres = parse_gres(line["gres"])
    gpus = [each for each in gres if each.name == "gpu"]
    count, kind = sum(each.count for each in gpus), gpus[0].type
    shards = sum(each.count for each in gres if each.name == "shard")
    name = f"nodes {line['nodename']}"
    card = _card(kind, site)
    most = None if card is None else card.usable // GIB
    each = f"{count} x {most} = {count * most}" if most is not None else "one for each GiB of its GPUs"
    if not shards:
        return Finding(False, f"{name}: no shards: needed Gres={line['gres']},shard:N, N being {each}")
    if shards % count:
        return Finding(False, f"{name}: {shards} shards for {count} GPUs: needed as many for each")
    if card is None:
        called = f"Gres type {kind!r}" if kind else "GPUs without a type"
        return Finding(
            False, f"{name}: {called}: needed a line under [gpus] of {SITE_FILE} that says which GPU that is"
        )
    size = card.usable / GIB / (shards // count)
    return Finding(True, f"{name}: {count} x {card.name}, {shards // count} shards a GPU of {size:.2f} GiB each")


def _card(kind: str | None, site: SiteFile) -> GPU | None:
    try:
        return None if kind is None else find_gpu(site.gpus.get(kind.casefold(), kind))
    except (UnknownName, InvalidValue):
        return None


def _gres_conf(path: Path, nodes: list[Line]) -> Finding:
    if not path.exists():
        return Finding(False, f"{path} is not there: needed lines for the GPUs and Name=shard Count=N")
    lines = list(read_lines(path))
    counts = {int(line["count"]) for line in lines if line.get("name") == "shard" and line.get("count", "").isdigit()}
    asked = {each.count for line in nodes for each in parse_gres(line["gres"]) if each.name == "shard"}
    if not counts:
        return Finding(False, f"{path}: no shards: needed a line Name=shard Count=N for each kind of node")
    if asked - counts:
        wrong = ", ".join(map(str, sorted(asked - counts)))
        return Finding(False, f"{path}: no line Name=shard Count={wrong}, which slurm.conf says; both must be the same")
    return Finding(True, f"{path}: shards {', '.join(map(str, sorted(counts)))}")


def _plugin(settings: Line, name: str, file: Path) -> Finding:
    given = settings.get(name.lower(), "")
    if "lua" not in given.split(","):
        wanted = ",".join([*filter(None, given.split(",")), "lua"])
        return Finding(False, f"{name}={given}: needed {name}={wanted}, and {file.name} beside slurm.conf")
    if not file.exists():
        return Finding(False, f"{name}={given}, but {file} is not there: 'ullage slurm configure --write' makes it")
    if "Ullage" not in file.read_text(errors="replace"):
        return Finding(False, f"{file} is the site's own: needed what Ullage's {file.name} does in it as well")
    return Finding(True, f"{name}={given}, {file.name}")


def _script(settings: Line, name: str) -> Finding:
    given = settings.get(name.lower(), "")
    return Finding(bool(given), f"{name}={given}" + ("" if given else f": needed mps_{_snake(name)}.sh for MPS"))


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _requeue(settings: Line) -> Finding:
    given = settings.get("jobrequeue", "1")
    good = given != "0"
    return Finding(good, f"JobRequeue={given}" + ("" if good else ": a job that ran out of memory cannot come back"))
