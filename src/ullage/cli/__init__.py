"""The command line: parses options, calls the API, prints results. Commands on one subject share a module.

`main.py` lists the commands. Nothing is computed here.
"""

from ullage.cli.main import all_commands, app, main

__all__ = ["all_commands", "app", "main"]
