"""Other tools' configurations, as keys of a recipe: what an accelerate YAML and a DeepSpeed JSON say about ranks and precision.

Every key of such a file is taken over, named as one that has no counterpart here, or refused; only what is switched off needs
no word. Knows nothing of torch, accelerate or DeepSpeed.
"""
