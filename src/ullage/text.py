"""Untrusted text made safe to show: on one line, without characters that move the cursor or reverse the text."""

import re
from typing import Any

_STYLE = re.compile("\x1b\\[[0-9;]*m")  # colours and bold, which have no meaning here

AFTER_THE_TIME = "what comes after the time limit"  # left out of an estimate


def plain(text: str) -> str:
    """Remove colours, and replace control, bidirectional and invisible characters by `?`, and line ends and tabs by
    spaces.

    >>> plain("\\x1b[1mtrain\\x1b[0m\\x1b[2J\\u202etxt.py\\nnext")
    'train?[2J?txt.py next'
    """
    if text.isprintable():
        return text
    text = _STYLE.sub("", text)
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text)


def plain_values(answer: Any) -> Any:
    """Apply `plain` to every text in an answer of the daemon, to show it in a terminal."""
    if isinstance(answer, str):
        return plain(answer)
    if isinstance(answer, dict):
        return {name: plain_values(value) for name, value in answer.items()}
    return [plain_values(each) for each in answer] if isinstance(answer, list) else answer
