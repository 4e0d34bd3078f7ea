"""Models: making the built-in ones, loading a folder or hub id, exporting a folder that transformers loads.

This room knows transformers and nothing about environments, chats or training.
"""
