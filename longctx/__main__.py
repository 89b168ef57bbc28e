"""`python -m longctx`, and thereby `torchrun -m longctx`: the same as the `longctx` command."""

import sys

from longctx.cli import main

if __name__ == "__main__":
    sys.exit(main())
