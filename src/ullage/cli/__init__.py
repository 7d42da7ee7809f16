"""The command line: parse, call, print."""

from ullage.cli.main import app, main

__all__ = ["app", "main"]
