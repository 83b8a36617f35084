"""One version in all places, and workflows that check what pyproject.toml promises."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import mup_tpu

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def commands(workflow: str) -> list[str]:
    jobs = yaml.safe_load((WORKFLOWS / workflow).read_text(encoding="utf-8"))["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_every_place_has_the_version_of_the_package():
    assert "version" in PROJECT["dynamic"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == mup_tpu.__version__
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert headings[:2] == ["Unreleased", mup_tpu.__version__]


@pytest.mark.parametrize("workflow", ["ci.yml", "nightly.yml"])
def test_workflows_run_scripts_that_exist(workflow):
    scripts = re.findall(r"(?:bash|source) (\S+)", "\n".join(commands(workflow)))
    assert scripts
    for script in scripts:
        assert (ROOT / script).is_file(), script


def test_the_workflow_tests_every_supported_python():
    jobs = yaml.safe_load((WORKFLOWS / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    asked = {
        step["with"]["python-version"] for job in jobs.values() for step in job["steps"] if "with" in step
    }
    tested = set(jobs["tests"]["strategy"]["matrix"]["python"]) | {v for v in asked if "$" not in v}
    supported = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: Python :: 3." in c}
    assert tested == supported


def test_the_oldest_versions_of_the_workflow_are_the_lower_bounds():
    pins = dict(re.findall(r"'(\w+)==([\d.]+)\.\*'", "\n".join(commands("ci.yml"))))
    required = map(Requirement, PROJECT["dependencies"] + PROJECT["optional-dependencies"]["train"])
    lowest = {r.name: str(r.specifier).removeprefix(">=") for r in required}
    assert pins == {name: lowest[name] for name in ("numpy", "pandas", "torch")}
