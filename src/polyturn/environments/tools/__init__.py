"""Tools that environments give to models, each with limits of its own. Nothing here knows tasks or trajectories."""
