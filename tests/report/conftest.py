"""The loop references of the model's tests are shared."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "model"))
