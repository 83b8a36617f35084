"""Notebooks run top to bottom and print their committed output, all but one without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
TRAINS = "05_your_own_model"
"""Notebook that needs torch."""
NIGHTLY = ("02", "03", "06")
"""Notebooks of which the others show the same calls, or that plan, sweep or analyse for a long time."""
EXECUTE = """
import json, sys
import nbformat, nbclient
notebook = nbformat.read(sys.argv[1], 4)
notebook.cells.append(nbformat.v4.new_code_cell("import sys; print('torch' in sys.modules)"))
resources = {"metadata": {"path": sys.argv[2]}}
# What a cell prints comes in as many pieces as the machine's load has it.
nbclient.NotebookClient(notebook, timeout=300, resources=resources, coalesce_streams=True).execute()
*outputs, last = [cell.get("outputs", []) for cell in notebook.cells]
print(json.dumps([outputs, last[0]["text"].strip()]))
"""


WITHOUT_KERNEL = """
import json, os, sys
from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
class Hook(DisplayHook):
    def __call__(self, result=None):
        if result is not None and not self.quiet():
            values.append(result)
class Shell(InteractiveShell):
    displayhook_class = Hook
    def enable_gui(self, gui=None):
        pass
os.chdir(sys.argv[1])
found = []
for file in sys.argv[2:]:
    shell = Shell.instance()
    shell.reset()
    found.append([])
    for cell in json.load(open(file))["cells"]:
        outputs, values = [], []
        if cell["cell_type"] == "code":
            with capture_output() as captured:
                shell.run_cell("".join(cell["source"])).raise_error()
            if captured.stdout:
                outputs.append({"output_type": "stream", "name": "stdout", "text": captured.stdout})
            outputs += [{"output_type": "display_data"} for _ in captured.outputs + values]
        found[-1].append(outputs)
print(json.dumps(found))
print(json.dumps("torch" in sys.modules))
"""
"""Runs notebooks in one process, without a kernel; prints the cells' outputs, and if torch was imported."""


def printed(outputs) -> list[str]:
    """Return what the cells printed, without numbers: these may differ in the last digit."""
    # A kernel may send what one cell prints in several pieces.
    text = ["".join("".join(o["text"]) for o in cell if o["output_type"] == "stream") for cell in outputs]
    return [re.sub(r"[-\d.e+]+", "#", t) for t in text]


def kinds(outputs) -> list[list[str]]:
    return [[o["output_type"] for o in cell if o.get("name") != "stderr"] for cell in outputs]


def run(code: str, *arguments: Path) -> list[str]:
    """Return the lines that a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout.splitlines()


def in_a_kernel(notebook: Path):
    """Return the outputs of a notebook's cells, and whether these import torch."""
    return json.loads(run(EXECUTE, notebook, FOLDER)[-1])


def committed(name: str):
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    return [cell.get("outputs", []) for cell in cells]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_with_outputs(name):
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in code)
    assert not [o for cell in code for o in cell["outputs"] if o["output_type"] == "error"]
    assert not [o for cell in code for o in cell["outputs"] if o.get("name") == "stderr"], (
        "a machine's warning"
    )
    assert any("image/png" in o.get("data", {}) for cell in code for o in cell["outputs"])


def shown(outputs) -> list[int]:
    """Return how many tables and figures each cell showed."""
    return [sum(kind != "stream" for kind in cell) for cell in kinds(outputs)]


def test_cells_print_their_committed_output_and_a_study_s_show_tables_and_a_picture(tmp_path):
    names = [name for name in NOTEBOOKS if name != TRAINS and name[:2] not in NIGHTLY]
    notebooks = [*(FOLDER / f"{name}.ipynb" for name in names), notebook_of_a_study(tmp_path)]
    *_, outputs, imports_torch = run(WITHOUT_KERNEL, FOLDER, *notebooks)
    assert imports_torch == "false"
    *found, of_study = json.loads(outputs)
    for name, outputs in zip(names, found, strict=True):
        assert printed(outputs) == printed(committed(name)), name
        assert shown(outputs) == shown(committed(name)), name
    assert shown(of_study)[1:] == [1] * (len(DISPLAYED) - 1)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if name != TRAINS])
def test_runs_top_to_bottom_without_torch(name):
    outputs, imports_torch = in_a_kernel(FOLDER / f"{name}.ipynb")
    assert imports_torch == "False"
    assert printed(outputs) == printed(committed(name))
    assert kinds(outputs) == kinds(committed(name))


@pytest.mark.nightly
def test_your_own_model_runs_top_to_bottom(tmp_path):
    """With fewer steps and seeds. Numbers and verdicts may differ between machines; the check's may not."""
    text, copy = (FOLDER / f"{TRAINS}.ipynb").read_text(), tmp_path / "shorter.ipynb"
    assert text.count("STEPS = 40") == text.count("for seed in range(3)") == 1
    copy.write_text(text.replace("STEPS = 40", "STEPS = 12").replace("in range(3)", "in range(2)"))
    outputs, _ = in_a_kernel(copy)
    assert kinds(outputs) == kinds(committed(TRAINS))
    text = "".join("".join(o["text"]) for cell in outputs for o in cell if o["output_type"] == "stream")
    for sentence in (
        "mup: no layer grows with width", "SP: DRIFTS",
        "sp: model.layers.0.self_attn.q_proj.weight (hidden) grows",
    ):  # fmt: skip
        assert sentence in text


DISPLAYED = {
    "run": """
import tempfile
from mup_tpu import Study
study = Study(tempfile.mkdtemp(), scale={"width": [1, 2, 4]}, tune={"rate": [2.0**x for x in range(-3, 4)]})
def train(trial, report):
    import math
    return 2 + 0.1 * (math.log2(trial.rate) + 0.5 * math.log2(trial.width)) ** 2
study.run(train, workers=2)
""",
    "study": "study",
    "verdict": "study.verdict()",
    "plot": "study.plot('transfer')",
    "predict": "study.predict(width=16)",
}
"""Cells of a study in a notebook, by what they show."""


def notebook_of_a_study(folder: Path) -> Path:
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cells = [cell | {"source": code, "id": f"c{i}"} for i, code in enumerate(DISPLAYED.values())]
    content = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "study.ipynb").write_text(json.dumps(content))
    return folder / "study.ipynb"


@pytest.mark.nightly
def test_a_study_in_a_notebook_shows_one_bar_tables_and_a_picture(tmp_path):
    outputs, _ = in_a_kernel(notebook_of_a_study(tmp_path))
    outputs = dict(zip(DISPLAYED, outputs, strict=True))
    bars = [o["data"]["text/plain"] for o in outputs["run"] if o["output_type"] == "display_data"]
    assert sum("21 of 21 trials stored" in bar for bar in bars) == 1 and len(outputs["run"]) <= 4
    for name in ("study", "verdict", "predict"):
        assert "<tr" in outputs[name][-1]["data"]["text/html"], name
    assert "DRIFTS" in outputs["verdict"][-1]["data"]["text/plain"]
    assert "image/png" in outputs["plot"][-1]["data"]
