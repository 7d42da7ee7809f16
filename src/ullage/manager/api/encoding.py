"""Answers as JSON. Long ones are made row by row in another thread: ten thousand jobs hold up nobody else's answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

_MANY = 100  # rows


async def encoded(answer: Any) -> bytes:
    """Return an answer as JSON, made in another thread if it is long."""
    return await asyncio.to_thread(encode, answer) if _is_long(answer) else encode(answer)


def encode(answer: Any) -> bytes:
    return _text(answer).encode()


def _text(answer: Any) -> str:
    """Encode a long answer row by row: `json.dumps` blocks all other threads until it is done."""
    if not _is_long(answer):
        return json.dumps(answer, allow_nan=False, default=str)
    if isinstance(answer, dict):
        return "{" + ", ".join([f"{json.dumps(name)}: {_text(value)}" for name, value in answer.items()]) + "}"
    return "[" + ", ".join([_text(row) for row in answer]) + "]"


def _is_long(answer: Any) -> bool:
    if isinstance(answer, dict):
        return any(_is_long(value) for value in answer.values() if isinstance(value, dict | list))
    return isinstance(answer, list) and len(answer) > _MANY and isinstance(answer[0], dict)
