"""What a run needs and costs, before anything is loaded or paid for.

This room knows recipes, published facts of hardware and models, and arithmetic. It needs no torch, no GPU and no network.
"""
