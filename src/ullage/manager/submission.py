"""What can be asked for: a job's command and all that goes with it, checked before anything is written."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

MOST_WORDS, LONGEST_COMMAND, LARGEST_ENVIRONMENT, LONGEST_ARRAY = 4096, 128 << 10, 512 << 10, 10_000
Text = Annotated[str, StringConstraints(max_length=4096)]
Name = Annotated[str, StringConstraints(max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]


class After(BaseModel):
    """A job to wait for: until it is done (`ok`; without that the waiting one is cancelled) or over (`any`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: int = Field(ge=1)
    kind: Literal["ok", "any"] = "ok"


class Spec(BaseModel):
    """A job as it is asked for. Memory in bytes, times in seconds; `None` is: not said.

    >>> Spec(command=["python", "train.py"], cwd="/tmp").title
    'train.py'
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: list[Text] = Field(min_length=1, max_length=MOST_WORDS)
    cwd: Text
    name: Name | None = None
    env: dict[Text, Annotated[str, StringConstraints(max_length=LONGEST_COMMAND)]] = {}
    venv: Text | None = None
    conda: Text | None = None
    gpus: int = Field(default=1, ge=1, le=1024)
    memory: int | None = Field(default=None, gt=0, le=1 << 50)
    host_memory: int | None = Field(default=None, gt=0, le=1 << 60)
    model: Text | None = None
    batch_size: int | None = Field(default=None, ge=1, le=1 << 40)
    estimate_options: dict[Text, Any] = {}
    exclusive: bool = False
    priority: int = Field(default=0, ge=-1000, le=1000)
    time_limit: float | None = Field(default=None, gt=0, le=3.2e9)
    resumable: bool = False
    checkpoint_signal: Literal["USR1", "USR2", "TERM", "INT", "HUP"] | None = None
    checkpoint_lead: float | None = Field(default=None, ge=0, le=3.2e9)
    estimator: Annotated[str, StringConstraints(max_length=64)] | None = None
    array: list[int] | None = Field(default=None, min_length=1, max_length=LONGEST_ARRAY)
    after: list[After] = Field(default=[], max_length=1000)
    hold: bool = False
    mps_threads: int | None = Field(default=None, ge=1, le=100)
    mps_memory: int | None = Field(default=None, gt=0, le=1 << 50)
    umask: int = Field(default=0o022, ge=0, le=0o777)

    @field_validator("command")
    @classmethod
    def _command(cls, words: list[str]) -> list[str]:
        if not words[0]:
            raise ValueError("needed a command; found an empty word")
        if any("\x00" in word for word in words) or sum(len(word) for word in words) > LONGEST_COMMAND:
            raise ValueError(f"needed words without NUL, {LONGEST_COMMAND} characters in all")
        return words

    @field_validator("cwd", "venv")
    @classmethod
    def _absolute(cls, path: str | None) -> str | None:
        if path is not None and (not os.path.isabs(path) or "\x00" in path):
            raise ValueError(f"needed an absolute path; found {path[:80]!r}")
        return path

    @field_validator("env")
    @classmethod
    def _environment(cls, env: dict[str, str]) -> dict[str, str]:
        if sum(len(name) + len(value) for name, value in env.items()) > LARGEST_ENVIRONMENT:
            raise ValueError(f"needed an environment of at most {LARGEST_ENVIRONMENT} characters")
        for name, value in env.items():
            if not re.fullmatch(r"[^=\x00]+", name) or "\x00" in value:
                raise ValueError(f"needed names and values without = and NUL; found {name[:80]!r}")
        return env

    @field_validator("array")
    @classmethod
    def _array(cls, array: list[int] | None) -> list[int] | None:
        if array is not None and (len(set(array)) < len(array) or min(array) < 0 or max(array) > 10**9):
            raise ValueError("needed different numbers from 0 to 1000000000")
        return array

    @model_validator(mode="after")
    def _together(self) -> Spec:
        if self.venv and self.conda:
            raise ValueError("needed a venv or a conda environment; found both")
        return self

    @property
    def title(self) -> str:
        """The name, or what the command runs."""
        if self.name:
            return self.name
        script = next((word for word in self.command[1:] if word.endswith(".py")), self.command[0])
        return os.path.basename(script)[:128] or "job"
