"""`ullage`, and `python -m ullage`."""

from __future__ import annotations

import gc


def main() -> None:
    """Run the command line."""
    from ullage.cli import main as run

    try:
        run()
    finally:
        gc.freeze()  # at its end Python looks for garbage in all that was imported, though its memory goes anyway


if __name__ == "__main__":
    main()
