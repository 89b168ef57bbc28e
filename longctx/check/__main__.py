"""`python -m longctx_check`, and thereby `torchrun -m longctx_check`: the same as the
`longctx-check` command."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
