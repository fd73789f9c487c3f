"""`python -m compiled_fsdp`."""

import sys

from .cli import main

sys.exit(main())
