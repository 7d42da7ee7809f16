"""Memory over time: the trace of a run, the HTML page that draws it, and a snapshot for PyTorch's own viewer.

A trace is recorded only on request.
"""
