"""Environments of other packages, as environments of ours."""
