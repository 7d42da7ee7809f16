"""Runs Slurm's commands as this user. Each has a time limit, since a controller may be down."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.errors import SlurmFailed

LIMIT = 30.0  # seconds for one command
_MARK = "ullage:"


@dataclass(frozen=True)
class Gres:
    """One generic resource: `gpu:a100:4` or `shard:12`."""

    name: str
    type: str | None
    count: int


@dataclass(frozen=True)
class SlurmNode:
    """A node, its GPUs, and the number of shards of each GPU (0: GPUs are not shared)."""

    name: str
    state: str
    gpus: int
    gpu_type: str | None
    shards: int
    partitions: tuple[str, ...] = ()

    @property
    def shards_per_gpu(self) -> int:
        return self.shards // self.gpus if self.gpus else 0


@dataclass(frozen=True)
class SlurmJob:
    """A job in the output of `squeue`."""

    id: int
    name: str
    user: str
    state: str
    reason: str
    comment: str
    nodes: str
    requested: tuple[Gres, ...]  # on each node
    allocated: tuple[str, ...]  # on each of its nodes: "shard:12(IDX:0)"
    restarts: int
    requeue: bool
    exit_code: int
    started: int
    ended: int
    array_job: int

    @property
    def shards(self) -> int | None:
        """Return the shards that it requests on each node, or `None`."""
        return next((gres.count for gres in self.requested if gres.name == "shard"), None)


def run(*words: str, limit: float = LIMIT, environment: Mapping[str, str] | None = None, text: str = "") -> str:
    """Return the output of a Slurm command; raise `SlurmFailed` if it is missing, fails or takes too long."""
    program = shutil.which(words[0])
    if program is None:
        raise SlurmFailed(
            f"{words[0]} is not here: this must run where Slurm's commands are, such as a login node "
            "(Debian and Ubuntu: apt-get install slurm-client)"
        )
    try:
        done = subprocess.run(
            [program, *words[1:]],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            env=None if environment is None else {**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        raise SlurmFailed(
            f"{words[0]} did not answer within {limit:g} s; does 'scontrol ping' say that slurmctld is up?"
        ) from None
    except OSError as error:
        raise SlurmFailed(f"{words[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        lines = (re.sub(r"^\w+: (error: )?", "", line.strip()) for line in (done.stderr or done.stdout).splitlines())
        raise SlurmFailed(f"{words[0]} failed: {'; '.join(filter(None, lines)) or done.returncode}")
    return done.stdout


def submit(words: Sequence[str], environment: Mapping[str, str] | None = None, script: str = "") -> int:
    """Run `sbatch WORDS`, and return the number of the new job. `script` is its text if no word names a file."""
    printed = run("sbatch", "--parsable", *words, environment=environment, text=script)
    return int(printed.strip().splitlines()[-1].split(";")[0])


def jobs(numbers: Sequence[int] = (), everybody: bool = True) -> list[SlurmJob]:
    """Return the jobs that Slurm knows, including recently finished ones, of all users or of this one."""
    words = ["squeue", "--json", "--states=all"]
    words += [f"--jobs={','.join(map(str, numbers))}"] if numbers else []
    words += [] if everybody else ["--me"]
    try:
        answer = json.loads(run(*words))
        data, errors = answer["jobs"], answer.get("errors")
    except (ValueError, KeyError):
        raise SlurmFailed("squeue --json printed no JSON: Slurm 21.08 or newer is needed") from None
    if errors and not data:  # it exits with 0 even without an answer
        raise SlurmFailed(
            f"squeue failed: {errors[0].get('description')}; does 'scontrol ping' say that slurmctld is up?"
        )
    return [_job(each) for each in data if not numbers or _number(each["job_id"]) in numbers]


def nodes() -> list[SlurmNode]:
    lines = run("scontrol", "--oneliner", "show", "nodes").splitlines()
    return [_node(line) for line in lines if line.startswith("NodeName=")]


def default_partition() -> str | None:
    return next((name[:-1] for name in run("sinfo", "--noheader", "--format=%P").split() if name.endswith("*")), None)


def configuration() -> dict[str, str]:
    lines = run("scontrol", "show", "config").splitlines()
    return {key.strip(): value.strip() for key, equals, value in (line.partition("=") for line in lines) if equals}


def version() -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", configuration().get("SLURM_VERSION", ""))[:3])


def parse_gres(text: str) -> tuple[Gres, ...]:
    """Parse a list of resources as Slurm writes it.

    >>> parse_gres("gres:gpu:a100:4(S:0-1),shard:160(IDX:0)")
    (Gres(name='gpu', type='a100', count=4), Gres(name='shard', type=None, count=160))
    >>> parse_gres("gres/gpu=2,gres/shard:a100=3"), parse_gres("(null)")
    ((Gres(name='gpu', type=None, count=2), Gres(name='shard', type='a100', count=3)), ())
    """
    resources = []
    for word in re.sub(r"\([^)]*\)", "", text).split(","):
        parts = re.split(r"[:=]", re.sub(r"^gres[:/]", "", word.strip()))
        if not parts[0]:
            continue
        count = _count(parts[-1]) if len(parts) > 1 else None
        named = parts[1:] if count is None else parts[1:-1]
        resources.append(Gres(parts[0], named[0] if named else None, 1 if count is None else count))
    return tuple(resources)


def _count(text: str) -> int | None:
    """Parse a count, which may end with a factor: 2K."""
    match = re.fullmatch(r"(\d+)([kKmMgG]?)", text)
    return int(match[1]) * 1024 ** " kmg".index(match[2].lower() or " ") if match else None


def write_comment(values: dict[str, Any], own: str = "") -> str:
    """Return a job's comment with plain values after the user's own text; Slurm stores the comment.

    >>> write_comment({"upper": 5, "shards": 1}, "night run")
    'night run ullage:{"upper":5,"shards":1}'
    """
    before = re.sub(rf"(?:^|\s){_MARK}\{{.*\}}\s*$", "", own, flags=re.S).strip()
    return f"{before} " * bool(before) + _MARK + json.dumps(values, separators=(",", ":"))


def read_comment(comment: str) -> dict[str, Any] | None:
    """Return the values that `write_comment` put into a comment; `None` if it has none.

    >>> read_comment('night run ullage:{"upper":5}'), read_comment("night run")
    ({'upper': 5}, None)
    """
    match = re.search(rf"(?:^|\s){_MARK}(\{{.*\}})\s*$", comment, re.S)
    try:
        values = json.loads(match[1]) if match else None
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _node(line: str) -> SlurmNode:
    fields = dict(re.findall(r"(?:^|\s)(NodeName|State|Gres|Partitions)=(\S*)", line))
    gres = parse_gres(fields.get("Gres", ""))
    gpus = [each for each in gres if each.name == "gpu"]
    return SlurmNode(
        name=fields["NodeName"],
        state=fields.get("State", ""),
        gpus=sum(each.count for each in gpus),
        gpu_type=next((each.type for each in gpus), None),
        shards=sum(each.count for each in gres if each.name == "shard"),
        partitions=tuple(filter(None, fields.get("Partitions", "").split(","))),
    )


def _job(data: dict[str, Any]) -> SlurmJob:
    return SlurmJob(
        id=_number(data["job_id"]),
        name=data.get("name") or "",
        user=data.get("user_name") or "",
        state=_state(data.get("job_state")),
        reason=_first(data.get("state_reason")),
        comment=_text(data.get("comment")),
        nodes=data.get("nodes") or "",
        requested=parse_gres(data.get("tres_per_node") or ""),
        allocated=tuple(data.get("gres_detail") or ()),
        restarts=_number(data.get("restart_cnt")),
        requeue=bool(data.get("requeue")),
        exit_code=_exit_code(data.get("exit_code")),
        started=_number(data.get("start_time")),
        ended=_number(data.get("end_time")),
        array_job=_number(data.get("array_job_id")),
    )


# Slurm 22.05 writes 7, "RUNNING" and a wait status; later releases write {"set": true, "number": 7}, ["RUNNING"] and
# {"return_code": ...}.
def _number(data: Any) -> int:
    return int((data.get("number") if isinstance(data, dict) else data) or 0)


def _state(data: Any) -> str:
    """Return a job's state; `COMPLETING` while its epilogs run."""
    return "COMPLETING" if "COMPLETING" in (data or ()) else _first(data)


def _first(data: Any) -> str:
    return str((data[0] if data else "") if isinstance(data, list) else data or "")


def _text(data: Any) -> str:
    return str((data.get("job") if isinstance(data, dict) else data) or "")


def _exit_code(data: Any) -> int:
    """Return the exit code as in a shell: 128 and more for a signal."""
    if isinstance(data, dict):
        number = _number((data.get("signal") or {}).get("id"))
        return 128 + number if number else _number(data.get("return_code"))
    status = int(data or 0)
    return 128 + (status & 0x7F) if status & 0x7F else status >> 8
