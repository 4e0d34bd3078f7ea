"""Processes: waits that end, background tasks that are never forgotten, and processes that leave nothing behind.

`deadlines` bounds single waits, `tasks` supervises background work, `heartbeat` writes the current waits to the run folder.
`role` is what a process knows of its place in a run. `starting`, `parents`, `descendants` and `endings` start processes and
end them, `keeper` ends what is left of a run when its supervisor is gone.
This room knows nothing about what is waited for, or what the processes do.
"""
