"""Imported by the server that the estimators' processes are forked from: loads what they would each load."""

from __future__ import annotations

from ullage.research.ranking.worker import load_packages

load_packages()
