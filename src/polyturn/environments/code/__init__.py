"""What `python_code` is made of: problems from rows, verdicts that are remembered, words about them for the model."""
