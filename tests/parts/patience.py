"""How long a test waits for what must happen. Only a test that fails waits so long, and a machine may be busy with others."""

PATIENCE_S = 240.0
