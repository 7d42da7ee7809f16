"""Child processes for Ullage's own work: limits, JSON messages, death with the parent, and the environment.

`parent` starts and watches a child, `child` is what runs inside it, `forking` saves the imports by forking. Callers
bring a function and a request; everything about the process itself belongs here.

`process_tree`, `job_watch`, `output`, `terminal` and `conda` are what a job's supervisor is made of. It runs without
installed packages, so these need the standard library only.
"""
