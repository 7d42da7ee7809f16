"""The API tokens of users. The database has only the hash, the user and the scope of each."""

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ullage.errors import InvalidValue
from ullage.manager.storage.database import Database
from ullage.manager.storage.job_store import JobStore

BEGINNING = "ullage_"


@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    """A token, without the token itself. Times are in seconds since 1970."""

    id: int
    hash: str
    uid: int
    user: str
    scope: str
    name: str
    made: float
    expires: float | None = None
    revoked: float | None = None


class TokenStore:
    """Makes, lists and revokes tokens, within a transaction of the job store. `find` is thread-safe."""

    def __init__(self, database: Database, store: JobStore, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        rows = database.rows("SELECT * FROM tokens ORDER BY id")
        self._by_hash = {row["hash"]: TokenRecord(**dict(row)) for row in rows}

    def make(self, uid: int, user: str, scope: str, name: str, lasts: float | None) -> tuple[str, TokenRecord]:
        """Make a token; return it, for the only time, with its record."""
        token = BEGINNING + secrets.token_urlsafe(32)
        now = self._clock()
        record = TokenRecord(
            id=max((each.id for each in self._by_hash.values()), default=0) + 1,
            hash=_hash(token),
            uid=uid,
            user=user,
            scope=scope,
            name=name,
            made=now,
            expires=None if lasts is None else now + lasts,
        )
        self._store.also(f"INSERT INTO tokens VALUES ({', '.join('?' * 9)})", tuple(record.__dict__.values()))
        self._store.afterwards(partial(self._take, record))
        return token, record

    def records(self, uid: int | None = None) -> list[TokenRecord]:
        """Return all records, or those of one user, oldest first."""
        return [each for each in list(self._by_hash.values()) if uid in (None, each.uid)]

    def one(self, number: int) -> TokenRecord:
        for record in self.records():
            if record.id == number:
                return record
        raise InvalidValue(f"no token {number}; 'ullage admin token list' lists them")

    def revoke(self, record: TokenRecord) -> None:
        """Revoke a token, from the commit of the transaction on."""
        now = self._clock()
        self._store.also("UPDATE tokens SET revoked = ? WHERE id = ?", (now, record.id))
        self._store.afterwards(partial(self._take, replace(record, revoked=now)))

    def find(self, token: str) -> TokenRecord | None:
        """Return the record of a token; `None` if it is unknown, revoked or expired."""
        record = self._by_hash.get(_hash(token)) if token.startswith(BEGINNING) else None
        if record is None or record.revoked is not None:
            return None
        return record if record.expires is None or self._clock() < record.expires else None

    def _take(self, record: TokenRecord) -> None:
        self._by_hash[record.hash] = record


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
