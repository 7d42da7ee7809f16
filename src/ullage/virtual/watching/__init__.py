"""Observation of a run, which changes nothing: origins of requests, steps, repetition, and missing packages."""
