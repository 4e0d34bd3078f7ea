"""Processes: waits that end, background tasks that are never forgotten, and what each role waits for right now.

`deadlines` bounds single waits, `tasks` supervises background work, `heartbeat` writes the current waits to the run folder.
This room knows nothing about what is waited for.
"""
