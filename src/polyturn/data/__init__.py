"""Data: rows of a file with their line numbers, and the order in which tasks are taken. Nothing here knows environments."""
