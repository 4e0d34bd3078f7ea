"""Launching: a recipe as roles, the processes of one machine that play them, and the supervisor that ends them all in order.

    gpus ── who gets which GPU                    starter ── a role as a local process
    roles ── a recipe as RoleSpecs                health ── who hangs, by the heartbeats
    supervisor ── starts, watches, ends           losses ── who is to blame, and how to say it
    logs ── one view of all log files             local ── all of it, for one machine

This room starts work and describes it; it imports none of it, and never torch.
"""
