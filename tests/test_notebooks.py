"""Notebooks run top to bottom in an environment without torch, and say what they were committed with."""

import json
import re
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
EXECUTE = """
import importlib.util, json, sys
import nbformat, nbclient
assert not importlib.util.find_spec("torch"), "torch is installed"
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": sys.argv[2]}}).execute()
print(json.dumps([cell.get("outputs", []) for cell in notebook.cells]))
"""


def printed(outputs) -> list[str]:
    """What the cells printed, numbers left out: those may differ in the last digit."""
    text = ["".join(o["text"]) for cell in outputs for o in cell if o["output_type"] == "stream"]
    return [re.sub(r"[-\d.e+]+", "#", t) for t in text]


def kinds(outputs) -> list[list[str]]:
    return [[o["output_type"] for o in cell] for cell in outputs]


def test_there_are_four():
    assert [name[:2] for name in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_with_outputs(name):
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in code)
    assert not [o for cell in code for o in cell["outputs"] if o["output_type"] == "error"]
    assert any("image/png" in o.get("data", {}) for cell in code for o in cell["outputs"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_top_to_bottom_without_torch(name, replay_python):
    command = [replay_python, "-c", EXECUTE, FOLDER / f"{name}.ipynb", FOLDER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout.splitlines()[-1])
    committed = [
        cell.get("outputs", []) for cell in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    ]
    assert printed(outputs) == printed(committed)
    assert kinds(outputs) == kinds(committed)
