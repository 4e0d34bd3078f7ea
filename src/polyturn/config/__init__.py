"""The recipe: one YAML file, typed, refused with a sentence when it can't be run.

`schema` says what a recipe may hold, `load` reads it with its line numbers and applies overrides, `resolve` derives every
other number once. This room knows nothing about models, environments or algorithms beyond their settings.
"""
