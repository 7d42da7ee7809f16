"""The resource manager: runs many jobs on shared GPUs and loses none.

`core/` decides, `storage/` remembers, `running/` starts processes, `api/` listens, and `client.py` talks to it all.
"""
