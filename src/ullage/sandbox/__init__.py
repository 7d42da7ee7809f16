"""Child processes for Ullage's own work: sandboxes, limits, messages, an end with the parent, and records of reads.

The input is a function (`MODULE:FUNCTION`) and a request of plain values; the output is its answer, or one sentence
that says how it ended. The function leaves nothing outside the sandbox, and nothing that it starts outlives the parent.
`parent` starts and watches a child, `child` is what runs inside it, `spawn` and `worker_pool` start or fork it. `guard`
isolates it: by an `overlay` of the `kernel`, or by `redirection`. `recording` records its reads.
"""
