"""`python -m polyturn`."""

import sys

from polyturn.cli.main import main

sys.exit(main())
