"""Scripts that import one another from this folder, also as `python -m bench.NAME`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
