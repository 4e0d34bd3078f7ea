"""Engines: ids in, sampled ids with log-probabilities out. They know nothing about messages, tasks or rewards.

`base` is the protocol; `hf` runs transformers in this process; `server` serves it over HTTP, and `http` is the client of such
servers; `scripted` replies from a script, for tests and demonstrations.
"""
