"""``python -m mirrored``."""

import sys

from mirrored._cli import main

sys.exit(main())
