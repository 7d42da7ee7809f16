"""The formats of traces: `own` is the project's; `carma` and `public` read those that others have published.

`ullage.manager.simulation.reading` lists them all. `files` opens files and reads tables; its errors name the line.
"""
