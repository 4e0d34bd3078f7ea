"""Metrics: their names, where they go, how long things took, and what a run's folder looks like.

`names` is the list, `sinks` writes a step's numbers, `spans` measures, `run_folder` lays out the folder, `logs` sets up
logging. This room takes numbers by name and knows nothing about how they came to be.
"""
