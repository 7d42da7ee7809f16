"""The web page: a process of its own that asks the daemon's HTTP API for whoever has signed in, and shows the answers.

`sessions` says who has signed in, `gate` what every request passes, `readings` keeps what the daemon answered, `server`
starts all of it. `frame`, `gpus`, `queue` and `job` are what is seen. The page has no rights of its own.
"""
