"""Child processes for Ullage's own work: private worlds, limits, messages, death with the parent, and what was read.

`parent` starts and watches a child, `child` is what runs inside it, `forking` saves the imports by forking. `guard`
shuts a child in: into a `world` made by the `kernel`, or by `redirection`. `recording` notes what it read. Callers
bring a function and a request; everything about the process itself belongs here.

`process_tree`, `job_watch`, `output`, `terminal` and `conda` are what a job's supervisor is made of. It runs without
installed packages, so these need the standard library only.
"""
