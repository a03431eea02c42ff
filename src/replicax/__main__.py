"""`python -m replicax` is the command line."""

import sys

from replicax.cli import main

sys.exit(main())
