"""Rollouts: drive environment x rendering x engine into trajectories, with deadlines, and record them.

`episode` plays one trajectory, `driver` runs a step's groups at once, `barrier` makes their order repeatable, `record`
writes and reads them. This room knows `engine.base` only, and nothing about credit or training.
"""
