"""The loop: the rooms put together. `sync` is the reference to read first; `build` is the only place that names concrete
engines and bridges; `step` holds the arrows between the rooms; `check` refuses what can't work before a model loads.
"""
