"""Checkpoints as files: sealed by a manifest, copied to tiers, found again, verified, kept or deleted.

`manifest` says what a whole checkpoint is, `stores` are the places that hold files (disk, S3, any fsspec URL, a memory-tier
daemon), `guard` and `breaker` keep a place that hangs from costing more than seconds, `tiers` copies a sealed checkpoint to
every place and finds the newest one that verifies, `retention` deletes what is no longer wanted. This room knows nothing about
what the files hold.
"""
