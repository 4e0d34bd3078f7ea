"""What a full state is, how it is written and read: PyTorch Distributed Checkpoint files, sealed and published by `storage`.

    state ── tree.split ──> tensors + JSON ── arena.stage ──> shared memory ── writer (a process) ──> files ──> tiers

The room knows nothing of trainers, loops and recipes: a state is nested dictionaries, lists, numbers and tensors, under the
names of its modules. A second model with an optimizer of its own is one more name.
"""
