"""Entry point of `python -m replicax`."""

import sys

from replicax.cli import main

sys.exit(main())
