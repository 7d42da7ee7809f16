"""The web page: a process of its own that asks the daemon's HTTP API for whoever has signed in, and shows the answers.

`sessions` says who has signed in, `gate` what every request passes, `readings` keeps what the daemon answered, `server`
starts all of it. `questions` brings questions for an estimate to the daemon, or answers them here where there is none.
The other modules are what is seen. The page has no rights of its own.
"""
