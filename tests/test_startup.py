"""Imports that a small analysis does without: half of its time was imports."""

import json
import subprocess
import sys

SLOW = ["scipy.stats", "scipy.optimize", "matplotlib", "mup_tpu.analysis.surface"]
FIGURES = ["matplotlib", "mup_tpu.plots", "jinja2"]
CODE = f"""
import json, sys
from mup_tpu.cli import main
try:
    main(["analyze", "results/decay_transfer"])
except SystemExit:
    pass
slow = [name for name in {SLOW} if name in sys.modules]
main(["analyze", sys.argv[1]])
print(json.dumps([slow, [name for name in {FIGURES} if name in sys.modules]]))
"""


def test_an_analysis_imports_no_slow_package_and_one_of_a_table_nothing_that_draws(tmp_path):
    rows = [f"{w},{2.0**x},{2 + 8 / w + (x + 7) ** 2 / 50}" for w in (64, 128) for x in range(-9, -4)]
    (tmp_path / "runs.csv").write_text("\n".join(["width,lr,loss", *rows]))
    command = [sys.executable, "-c", CODE, str(tmp_path / "runs.csv")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(printed.stdout.splitlines()[-1]) == [[], []]


def test_data_of_a_corpus_needs_no_file_system_of_shards():
    code = "import sys, mup_tpu.data; print('fsspec' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout == "False\n"
