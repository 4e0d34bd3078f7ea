"""A daemon that keeps files in the shared memory of its machine for others: `server`; `hyperpod` speaks HyperPod's protocol."""
