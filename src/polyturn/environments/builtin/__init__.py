"""Environments that come with Polyturn, one file each."""
