"""`python -m seqbraid`, the same as `seqbraid`."""

import sys

from .cli import main

sys.exit(main())
