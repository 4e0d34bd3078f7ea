"""`python -m polyturn`."""

from polyturn.cli.main import entry

entry()
