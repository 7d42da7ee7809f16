"""Sends requests for estimates to the daemon or, without one, answers them in processes of the page's own user.

Both store answers with the same keys: `id`, `state`, `question`, `reason`, `estimates` and `advice`.
"""

import json
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, NoDaemon, UnknownName
from ullage.hardware import default_gpu
from ullage.jobs.estimate_spec import EstimateSpec
from ullage.jobs.validation import checked
from ullage.manager.core.estimates import EstimateAnswer, EstimateRequest, Estimates
from ullage.manager.core.questions import known_gpus, request_of
from ullage.manager.running.launcher import write_whole
from ullage.manager.settings import EstimateSettings

Answer = dict[str, Any]

HERE = "here-"  # prefix of the ids of answers stored here
_ID = re.compile(r"here-[0-9a-f]{32}")
_MOST_OPEN = 20


class SessionQuestions:
    """The estimate requests of one session. `here` answers them without a daemon."""

    def __init__(self, ask: Callable[..., Awaitable[Any]], here: "OwnEstimates | None") -> None:
        self._ask, self._here = ask, here

    async def ask(self, question: dict[str, Any]) -> Answer:
        try:
            return dict(await self._ask("estimate", question=question))
        except NoDaemon:
            if self._here is None:
                raise
            return self._here.ask(question)

    async def look(self, number: str) -> Answer:
        if number.startswith(HERE):
            return self._own(number).one(number)
        return dict(await self._ask("estimated", estimate=number))

    async def give_up(self, number: str) -> None:
        if number.startswith(HERE):
            self._own(number).give_up(number)
        else:
            await self._ask("cancel_estimate", estimate=number)

    def _own(self, number: str) -> "OwnEstimates":
        if self._here is None:
            raise UnknownName("estimate", number[:80], [])
        return self._here


class OwnEstimates:
    """Estimates for the user of this process, stored in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Answer] = {}
        self._estimates = Estimates(EstimateSettings(), self._answered)

    def ask(self, question: dict[str, Any]) -> Answer:
        if len(self._open) >= _MOST_OPEN:
            raise InvalidValue(f"{_MOST_OPEN} estimates are under way; ask again when one is done")
        spec = checked(EstimateSpec, question, "the question")
        gpus = known_gpus(spec) or [default_gpu()]
        answer: Answer = {"id": f"{HERE}{secrets.token_hex(16)}", "state": "waiting", "asked": time.time()}
        answer |= {"answered": None, "question": question | {"gpu": gpus}, "reason": None}
        answer |= {"estimates": [], "advice": None}
        env = {name: value for name, value in os.environ.items() if name != "PATH"}  # use Ullage's own Python
        spec = spec.model_copy(update={"gpu": gpus, "env": env})
        self._open[answer["id"]] = answer
        self._estimates.want(answer["id"], request_of(spec, os.getuid(), os.getgid()))
        return self.one(answer["id"])

    def one(self, number: str) -> Answer:
        if number in self._open:
            return self._open[number] | {"reason": self._estimates.standing(number)}
        try:
            if _ID.fullmatch(number):
                return dict(json.loads((self._folder / f"{number}.json").read_text()))
        except (OSError, ValueError):
            pass
        raise UnknownName("estimate", number[:80], [])

    def give_up(self, number: str) -> None:
        if number in self._open:
            self._estimates.give_up([number])
            self._keep(self._open.pop(number) | {"state": "failed", "reason": "it was cancelled"})

    def close(self) -> None:
        for number in list(self._open):
            self.give_up(number)

    def _answered(self, numbers: Sequence[int | str], request: EstimateRequest, answer: EstimateAnswer) -> None:
        state = "done" if answer.estimates else "failed"
        for number in map(str, numbers):
            row = self._open.pop(number)
            self._keep(row | {"state": state} | answer.shown(row["question"]))

    def _keep(self, answer: Answer) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(self._folder / f"{answer['id']}.json", answer | {"answered": time.time()}, mode=0o600)
