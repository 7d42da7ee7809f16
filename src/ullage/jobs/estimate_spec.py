"""A request for an estimate without a job (`EstimateSpec`), for `POST /v1/estimates` and `Client.estimate`."""

from typing import Annotated, Any

from ullage.errors import MissingPackage
from ullage.jobs.job_files import JobSpec

try:
    from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
except ModuleNotFoundError:
    raise MissingPackage("pydantic", "questions to a daemon") from None

LONGEST_SCRIPT, MOST_GPUS = 1 << 20, 16
SCRIPT = "script.py"  # file name of a script that comes as text
_Word = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00]*$")]
_Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class EstimateSpec(BaseModel):
    """A question: a `model` by name, a `script` as text with its `args`, or a `command` that runs one.

    `options` are those of `ullage.estimate`; `batch_arg` among them names the argument of a script that sets its batch
    size, for advice. `gpu` is one name or several; by default the daemon's own GPUs. `cwd`, `env`, `venv` and `conda`
    are as in a job file. With `details`, the answer also has the timeline and the layers; with `advice`, changes that
    would make the job fit, or the largest batch if it fits.

    It does not check that the model or the GPU exists.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: _Word | None = Field(None, min_length=1)
    script: str | None = Field(None, min_length=1, max_length=LONGEST_SCRIPT)
    args: list[_Word] = Field([], max_length=4096)
    command: list[_Word] | None = Field(None, min_length=1, max_length=4096)
    options: dict[_Word, Any] = {}
    gpu: list[_Name] | _Name | None = None
    estimator: _Name | None = None
    cwd: _Word | None = None
    env: dict[_Word, str] = {}
    venv: _Word | None = None
    conda: _Word | None = None
    details: bool = True
    advice: bool = False

    @field_validator("gpu")
    @classmethod
    def _some(cls, value: list[str] | str | None) -> list[str] | str | None:
        if isinstance(value, list) and not 1 <= len(value) <= MOST_GPUS:
            raise ValueError(f"gpu must name 1 to {MOST_GPUS} GPUs, got {len(value)}")
        return value

    @model_validator(mode="after")
    def _one_thing(self) -> "EstimateSpec":
        given = [name for name in ("model", "script", "command") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs one of model, script and command, got {' and '.join(given) or 'none'}")
        if self.args and self.script is None:
            raise ValueError("args are for a script, got none; add script")
        taken = [name for name in ("source", "gpu", "estimator", "args", "module", "timeout") if name in self.options]
        if taken:
            raise ValueError(f"options: {taken[0]} cannot be one of them")
        _ = self.job  # checks the rest like a job
        return self

    @property
    def gpus(self) -> list[str]:
        """Return the named GPUs, each once."""
        return list(dict.fromkeys([self.gpu] if isinstance(self.gpu, str) else self.gpu or []))

    @property
    def job(self) -> JobSpec:
        command = self.command or ["python", SCRIPT, *self.args]
        where = {"cwd": self.cwd or "/", "env": self.env, "venv": self.venv, "conda": self.conda}
        return JobSpec.model_validate({"command": command, **where})

    @property
    def names_a_python(self) -> bool:
        """Whether a script runs in another Python than Ullage's own."""
        return self.venv is not None or self.conda is not None or "PATH" in self.env

    def to_dict(self) -> dict[str, Any]:
        """Return the given values, ready for JSON."""
        return self.model_dump(mode="json", exclude_unset=True)
