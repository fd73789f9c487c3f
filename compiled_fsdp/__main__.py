"""`python -m compiled_fsdp`, and the command `compiled-fsdp`."""

import sys

from compiled_fsdp.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
