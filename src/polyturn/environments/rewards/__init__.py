"""What environments score with: one small file a reward. `view` is what a reward sees, `base` runs it, `registry` finds it."""
