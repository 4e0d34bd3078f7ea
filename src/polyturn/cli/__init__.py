"""The command line: verbs, printing, exit codes. No logic of its own; every verb imports what it needs when it runs."""
