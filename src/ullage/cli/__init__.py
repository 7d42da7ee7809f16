"""The command line: parse, call, print. One module for each kind of thing that the commands are about.

`main.py` lists the commands. Nothing is computed here.
"""

from ullage.cli.main import all_commands, app, main

__all__ = ["all_commands", "app", "main"]
