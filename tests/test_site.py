"""Documentation site: built once, offline and without a dead link; its examples run."""

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
WITH_EXAMPLES = [
    file for file in sorted((ROOT / "mup_tpu").rglob("*.py")) if ">>> " in file.read_text("utf-8")
]


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_examples_in_docstrings_say_what_they_print(file, monkeypatch):
    """In the repository's top folder."""
    monkeypatch.chdir(ROOT)
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    ran = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert ran.attempted and not ran.failed


def test_the_snippet_for_python_runs(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "docs/reference/python.md", "exec"), {})
    out = capsys.readouterr().out
    assert "μP: TRANSFERS" in out and "SP: DRIFTS" in out and "at width 1024" in out
    assert (tmp_path / "transfer.png").exists()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as scripts/docs builds it."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.nightly
def test_the_site_has_every_page_and_no_dead_link(site):
    """Links in HTML files too; mkdocs checks those of Markdown in its strict mode."""
    places = (
        "*.md",
        "docs/**/*.md",
        "results/**/*.md",
        "benchmarks/*.md",
        "tests/**/*.md",
        "notebooks/*.ipynb",
    )
    for page in (page for pattern in places for page in ROOT.glob(pattern)):
        name = page.relative_to(ROOT).with_suffix(".html")
        assert (site / (name.with_name("index.html") if name.stem == "README" else name)).exists(), page
    for file in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?:]+)["#?]', file.read_text(encoding="utf-8")):
            target = site / link.lstrip("/") if file.name == "404.html" else file.parent / unquote(link)
            assert target.exists(), f"{file.relative_to(site)} links to {link}"


@pytest.mark.nightly
def test_the_site_asks_for_nothing_over_the_network(site):
    """No script, style or image comes from elsewhere; links for the reader may."""
    fetched = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")
    for file in site.rglob("*.html"):
        found = set(fetched.findall(file.read_text(encoding="utf-8")))
        assert not found, f"{file.relative_to(site)}: {found}"
    for file in site.rglob("*.css"):
        assert not re.findall(r"url\(\"?(?:https?:)?//", file.read_text(encoding="utf-8")), file.name


@pytest.mark.nightly
def test_the_reference_shows_what_packages_export(site):
    """Each name of a package's __all__, though mkdocstrings reads code without running it."""
    for name in ("analysis", "parametrize", "plots"):
        module = importlib.import_module(f"mup_tpu.{name}")
        text = (site / "docs" / "reference" / f"{name}.html").read_text(encoding="utf-8")
        assert [n for n in module.__all__ if f'id="mup_tpu.{name}.{n}"' not in text] == []
    for file in (site / "docs" / "reference").glob("*.html"):
        assert "<blockquote>" not in file.read_text(encoding="utf-8"), (
            f"{file.name}: >>> outside of Examples:"
        )
    page = (site / "docs" / "reference" / "analysis.html").read_text(encoding="utf-8")
    first = re.findall(r'id="mup_tpu\.analysis\.(\w+)"', page)[:2]
    assert first == ["load_table", "analyze"]
    for attribute in ("results", "epsilon", "delta"):
        assert f'id="mup_tpu.analysis.TransferAnalysis.{attribute}"' in page
