"""What environments score with. Nothing here knows tasks or trajectories."""
