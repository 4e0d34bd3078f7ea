"""Isolated execution of model-written code, and verdicts on it that it can't reach.

`base` is the contract, `local` runs programs on this machine, `http` on any other, `server` serves one sandbox to many.
This room knows nothing about tasks, rewards or models.
"""
