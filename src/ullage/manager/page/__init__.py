"""The web page: a process without rights of its own that uses the daemon's HTTP API with the tokens of signed-in
users.

`sessions` has the signed-in users, `gate` checks every request, `readings` caches the daemon's answers, `server` starts
everything, and `questions` requests estimates, also without a daemon. The other modules are visible pages.
"""
