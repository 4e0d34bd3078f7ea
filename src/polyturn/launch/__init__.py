"""Launch: starts the roles of a run, watches them, and ends them all. It describes work and starts it; it imports none."""
