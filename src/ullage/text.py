"""Text from others as it may be shown: on one line, without characters that move the cursor or turn the writing."""

import re
from typing import Any

_STYLE = re.compile("\x1b\\[[0-9;]*m")  # colours and bold, which have no meaning here

AFTER_THE_TIME = "what comes after the time limit"  # of an estimate: what was left out


def plain(text: str) -> str:
    """The text without colours, with `?` for control, bidirectional and invisible characters, and blanks for ends of
    lines and tabs.

    >>> plain("\\x1b[1mtrain\\x1b[0m\\x1b[2J\\u202etxt.py\\nnext")
    'train?[2J?txt.py next'
    """
    if text.isprintable():
        return text
    text = _STYLE.sub("", text)
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text)


def plain_values(answer: Any) -> Any:
    """The same for every text in an answer of the daemon, to show it in a terminal."""
    if isinstance(answer, str):
        return plain(answer)
    if isinstance(answer, dict):
        return {name: plain_values(value) for name, value in answer.items()}
    return [plain_values(each) for each in answer] if isinstance(answer, list) else answer
