"""The rates behind `ullage.utilization`: what they are fitted to, the fit, and how good it is on families left out.

`ullage train utilization` and `ullage evaluate utilization` are built on it.
"""
