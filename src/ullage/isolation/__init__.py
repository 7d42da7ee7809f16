"""Running something in a child process: limits, a JSON protocol, death with the parent, and the environment.

Every part of Ullage that starts a process for its own work starts it here.
"""
