"""Submissions that come at the same time share one transaction: a disk that syncs slowly is waited for once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ullage.errors import StoreDamaged, StoreFull, UllageError
from ullage.manager.book import Book

_Work = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Together:
    """Collects what arrives in one turn of the event loop and does it in the next.

    Each is answered when the transaction is on disk. One that is refused (`UllageError`) must have written nothing by
    then; the others go on. Where the transaction fails, nobody's work was done: all are told of a full or damaged disk,
    and after any other failure each is tried alone, so that one cannot spoil another.
    """

    def __init__(self, book: Book) -> None:
        self._book = book
        self._waiting: list[_Work] = []

    async def do(self, work: Callable[[], Any]) -> Any:
        """What `work` gives, once that is on disk."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((work, answer))
        if len(self._waiting) == 1:
            loop.call_soon(self._all)
        return await answer

    def _all(self) -> None:
        batch, self._waiting = [each for each in self._waiting if not each[1].cancelled()], []
        try:
            self._in_one(batch)
        except (StoreFull, StoreDamaged) as error:
            for _, answer in batch:
                answer.set_exception(type(error)(str(error)))
        except Exception as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            for each in batch:
                self._alone(each)

    def _in_one(self, batch: list[_Work]) -> None:
        done: list[tuple[asyncio.Future[Any], Any]] = []
        refused: list[tuple[asyncio.Future[Any], UllageError]] = []
        with self._book.transaction():
            for work, answer in batch:
                try:
                    done.append((answer, work()))
                except (StoreFull, StoreDamaged):
                    raise
                except UllageError as error:
                    refused.append((answer, error))
        for answer, result in done:
            answer.set_result(result)
        for answer, refusal in refused:
            answer.set_exception(refusal)

    def _alone(self, each: _Work) -> None:
        try:
            self._in_one([each])
        except Exception as error:
            each[1].set_exception(error)
