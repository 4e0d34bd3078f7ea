"""The trainer: packed rows in, a better policy out. It consumes per-token streams and never asks for an algorithm's name.

`settings` is what it needs to know, `forward` scores packed rows, `optimizer` builds optimizer and schedule, `trainer` runs
the optimizer steps of a batch.
"""
