"""Child processes for Ullage's own work: private worlds, limits, messages, death with the parent, and what was read.

In: a function (`MODULE:FUNCTION`) and a request of plain values. Out: its answer, or one sentence that says how it
ended. Whatever the function does, nothing of it is left outside, and nothing that it starts outlives its asker.
`parent` starts and watches a child, `child` is what runs inside it, `spawn` and `worker_pool` start or fork it. `guard`
shuts it in: into an `overlay` made by the `kernel`, or by `redirection`. `recording` notes what it read.
"""
