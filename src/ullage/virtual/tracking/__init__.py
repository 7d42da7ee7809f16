"""What is known about a run while it goes on: who asks for memory, which step it is in, whether it has settled.

Nothing here changes what a run allocates.
"""
