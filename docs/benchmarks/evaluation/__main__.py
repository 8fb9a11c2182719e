"""``python -m docs.benchmarks.evaluation``."""

import sys

from docs.benchmarks.evaluation.command import main

sys.exit(main())
