from parts.stub_runs import stub_run

__all__ = ["stub_run"]
