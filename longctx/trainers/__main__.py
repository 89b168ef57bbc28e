"""`python -m longctx.trainers`: see `longctx.trainers.launcher`."""

import sys

from longctx.trainers.launcher import main

main(sys.argv[1:])
