"""Search for environments: one protocol, and back ends that keep it. Knows nothing about models, rewards or training."""
