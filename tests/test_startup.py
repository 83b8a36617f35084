"""Imports that a small analysis does without: half of its time was imports."""

import json
import subprocess
import sys

SLOW = ["scipy.stats", "scipy.optimize", "matplotlib", "mup_tpu.analysis.surface"]
CODE = f"""
import sys
from mup_tpu.cli import main
try:
    main(["analyze", "results/decay_transfer"])
except SystemExit:
    pass
imported = [name for name in {SLOW} if name in sys.modules]
import json
print(json.dumps(imported))
"""


def test_an_analysis_imports_no_slow_package():
    printed = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert json.loads(printed.stdout.splitlines()[-1]) == []


def test_collections_are_off_while_a_server_imports_torch():
    code = (
        "import gc, sys, mup_tpu.jobs.preload; print('torch' in sys.modules, gc.get_freeze_count() > 10_000)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout == "True True\n"


def test_data_of_a_corpus_needs_no_file_system_of_shards():
    code = "import sys, mup_tpu.data; print('fsspec' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout == "False\n"
