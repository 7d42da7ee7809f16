"""Files of weights: whole or not there, and readable for whoever may read the folder."""

from __future__ import annotations

from pathlib import Path

from ullage.errors import InvalidValue


def write_weights(path: Path, content: bytes) -> None:
    """Write a file in place of the one that is there, which stays as it is if that fails.

    safetensors' own `save_file` gives files that nobody else may read.
    """
    new = path.with_name(path.name + ".new")
    try:
        new.write_bytes(content)
        new.rename(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise InvalidValue(f"cannot write the weights to {path}: {error.strerror or error}") from None
