"""Puts the jobs of these tests where processes of pools, Ray's too, can import them."""

import os
import sys
from pathlib import Path

_IMPORTABLE = str(Path(__file__).with_name("importable"))
sys.path.insert(0, _IMPORTABLE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_IMPORTABLE, os.environ.get("PYTHONPATH"))))
