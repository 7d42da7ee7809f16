"""The forms of traces: `own` is the project's, `carma` and `public` have those that others published.

`ullage.manager.simulation.reading` knows them all. `files` opens files and reads tables with errors that name the line.
"""
