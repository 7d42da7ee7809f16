"""One transaction for orders that come at the same time, written by another thread while the loop answers others."""

import asyncio
import time
from collections.abc import Callable, Generator
from typing import Any

from ullage.errors import StoreDamaged, StoreFull, UllageError
from ullage.manager.fault_injection import crash_point
from ullage.manager.storage.changes import Changes
from ullage.manager.storage.job_store import JobStore

SLICE = 0.02  # seconds of work after which others get their turn

_Work = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class GroupCommit:
    """Collects work while the last transaction is being written, and does it in the next.

    Work is a function, or a generator function that yields, that changes the store; its answer comes once the changes
    are on disk. Nobody else writes meanwhile (`JobStore.turn`). Refused work (`UllageError`) must have changed
    nothing. If the transaction fails, all get the error of a full or damaged disk; after other errors each is tried
    alone.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._waiting: list[_Work] = []
        self._working: asyncio.Task[None] | None = None

    async def do(self, work: Callable[[], Any]) -> Any:
        """What `work` gives, once that is on disk."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, answer))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work_off())
        return await answer

    async def close(self) -> None:
        """Do what is left."""
        if self._working is not None:
            await self._working

    async def _work_off(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # what comes in the same turn of the loop goes with it
            async with self._store.turn:
                batch, self._waiting = [each for each in self._waiting if not each[1].done()], []
                await self._all(batch)

    async def _all(self, batch: list[_Work]) -> None:
        try:
            await self._in_one(batch)
        except (StoreFull, StoreDamaged) as error:
            for _, answer in batch:
                _refuse(answer, type(error)(str(error)))
        except Exception as error:
            if len(batch) == 1:
                _refuse(batch[0][1], error)
                return
            for each in batch:
                await self._all([each])

    async def _in_one(self, batch: list[_Work]) -> None:
        changes = Changes()
        done: list[tuple[asyncio.Future[Any], Any]] = []
        refused: list[tuple[asyncio.Future[Any], UllageError]] = []
        for work, answer in batch:
            try:
                done.append((answer, await self._result(work, changes)))
            except (StoreFull, StoreDamaged):
                raise
            except UllageError as error:
                refused.append((answer, error))
        crash_point("order-before-commit")
        await self._store.write_aside(changes)
        crash_point("order-before-answer")
        for answer, result in done:
            if not answer.done():
                answer.set_result(result)
        for answer, refusal in refused:
            _refuse(answer, refusal)

    async def _result(self, work: Callable[[], Any], changes: Changes) -> Any:
        """Do a work, bit by bit; between two bits the store shows what is on disk."""
        with self._store.collecting(changes):
            result = work()
        if not isinstance(result, Generator):
            return result
        while True:
            with self._store.collecting(changes):
                until = time.monotonic() + SLICE
                try:
                    next(result)
                    while time.monotonic() < until:
                        next(result)
                except StopIteration as end:
                    return end.value
            await asyncio.sleep(0)


def _refuse(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
