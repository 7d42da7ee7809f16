"""Text from others as it may be shown: on one line, without characters that move the cursor or turn the writing."""

from __future__ import annotations

from typing import Any

AFTER_THE_TIME = "what comes after the time limit"  # of an estimate: what was left out


def plain(text: str) -> str:
    """The text with `?` for control, bidirectional and invisible characters, and blanks for ends of lines and tabs.

    >>> plain("train\\x1b[2J\\u202etxt.py\\nnext")
    'train?[2J?txt.py next'
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text)


def plain_values(answer: Any) -> Any:
    """The same for every text in an answer of the daemon, to show it in a terminal.

    >>> plain_values({"name": "a\\x1b[31m", "jobs": [1, "b\\u202e"]})
    {'name': 'a?[31m', 'jobs': [1, 'b?']}
    """
    if isinstance(answer, str):
        return plain(answer)
    if isinstance(answer, dict):
        return {name: plain_values(value) for name, value in answer.items()}
    return [plain_values(each) for each in answer] if isinstance(answer, list) else answer
