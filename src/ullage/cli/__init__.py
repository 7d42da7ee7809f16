"""The command line: parse, call, print. One module for each kind of thing that the commands are about.

`main.py` lists the commands. Nothing is computed here.
"""

from ullage.cli.main import app, main

__all__ = ["app", "main"]
