"""Import path of the training functions that tests of studies share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "study" / "importable"))
