"""Combines simultaneous orders into one transaction, which another thread writes while the loop answers others."""

import asyncio
import time
from collections.abc import Callable, Generator
from typing import Any

from ullage.errors import DiskFull, StoreDamaged, UllageError
from ullage.manager.fault_injection import crash_point
from ullage.manager.storage.changes import Changes
from ullage.manager.storage.job_store import JobStore

SLICE = 0.02  # seconds of work after which the event loop gets control

_Work = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class GroupCommit:
    """Collects work while a transaction is being written, and runs it in the next.

    Work is a function or generator function that changes the store; its answer comes once the changes are on disk.
    Nothing else writes meanwhile (`JobStore.turn`). Refused work (`UllageError`) must not have changed anything. If the
    disk is full or damaged, all work of the transaction gets the error; after other errors, each is tried alone.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._waiting: list[_Work] = []
        self._working: asyncio.Task[None] | None = None

    async def do(self, work: Callable[[], Any]) -> Any:
        """Run `work`, and return its result once its changes are on disk."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, answer))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work_off())
        return await answer

    async def close(self) -> None:
        """Finish the remaining work."""
        if self._working is not None:
            await self._working

    async def _work_off(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # include work from the same iteration of the loop
            async with self._store.turn:
                batch, self._waiting = [each for each in self._waiting if not each[1].done()], []
                await self._all(batch)

    async def _all(self, batch: list[_Work]) -> None:
        try:
            await self._in_one(batch)
        except (DiskFull, StoreDamaged) as error:
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
            except (DiskFull, StoreDamaged):
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
        """Run work in slices; between two slices the store shows only committed data."""
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
