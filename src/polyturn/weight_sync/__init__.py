"""Weight sync: bring the trainer's weights to the engine, all of them, and prove it. One bridge a file.

This room sits below trainer and engine and imports neither: a bridge sees named tensors on one side and something that
takes them on the other.
"""
