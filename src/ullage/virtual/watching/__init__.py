"""What is observed during a run: where requests come from, which step it is in, whether it repeats, what is uncertain.

Nothing here changes what a run allocates.
"""
