"""Import path of the trainers of these tests, for workers too."""

import os
import sys
from pathlib import Path

_IMPORTABLE = str(Path(__file__).with_name("importable"))
sys.path.insert(0, _IMPORTABLE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_IMPORTABLE, os.environ.get("PYTHONPATH"))))
