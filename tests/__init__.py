"""One thread in every process of the tests: those of several processes on two cores wait for each
other, ten times as long."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, which reads it
