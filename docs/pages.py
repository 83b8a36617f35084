"""The site's pages: the Markdown files and notebooks of the repository, each at its own path.

Links between them work on the site as on a forge. Other files that they link to (figures, tables, code) are
copied beside them. This is a hook of mkdocs, named in mkdocs.yml.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/**/*.md",
    "results/README.md",
    "results/*/README.md",
    "benchmarks/*.md",
    "tests/reference_runs/README.md",
    "docs/*.css",
    "docs/*.js",
)
LINK = re.compile(r"\]\(([^)#:\s]+)[^)\s]*\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Patterns in the navigation become the pages that they stand for."""
    config.nav = _expanded(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Every page, every notebook as a page, and the files that they link to, in place of the docs folder."""
    own = [file for file in files if not Path(file.abs_src_path or "").is_relative_to(ROOT / "docs")]
    found = {path: _copied(config, path) for pattern in PAGES for path in _paths(pattern)}
    for page in list(found):
        for path in _linked(ROOT / page):
            found.setdefault(path, _copied(config, path))
    notebooks = [file for path in _paths("notebooks/*.ipynb") for file in _executed(config, path)]
    return Files([*own, *(file for path, file in found.items() if not path.endswith(".ipynb")), *notebooks])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to notebooks lead to their pages; docstrings of commands stand below their heading."""
    # Who searches for a word wants the page that explains it, not a measurement or a constant that holds it.
    place = page.file.src_uri
    boost = 0.3 if place.startswith("docs/reference/") else 8 if place.startswith(("docs/", "README")) else 1
    page.meta["search"] = {"boost": boost}
    no_heading = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false"
    markdown = re.sub(r"^(## mup-tpu .+\n::: .+)$", rf"\1\n{no_heading}", markdown, flags=re.M)
    small_heading = "    options:\n      heading_level: 3"
    markdown = re.sub(r"^(::: .+(Options|Kept|Target))$", rf"\1\n{small_heading}", markdown, flags=re.M)
    return re.sub(r"\]\(([^)#:\s]+)\.ipynb\)", r"](\1.md)", markdown)


def _paths(pattern: str) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob(pattern))]


def _linked(page: Path) -> Iterator[str]:
    """Files of the repository that a page links to; a link that leads nowhere is mkdocs' to report."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        file = (page.parent / target).resolve()
        if file.is_file() and file.is_relative_to(ROOT):
            yield file.relative_to(ROOT).as_posix()


def _copied(config: MkDocsConfig, path: str) -> File:
    return File.generated(config, path, abs_src_path=str(ROOT / path))


def _executed(config: MkDocsConfig, path: str) -> Iterator[File]:
    """A notebook with the outputs that it was committed with: its page, then its figures."""
    exporter, name = MarkdownExporter(), path.removesuffix(".ipynb")
    text, resources = exporter.from_filename(str(ROOT / path), {"unique_key": Path(name).name})
    yield File.generated(config, f"{name}.md", content=text)
    for figure, content in resources["outputs"].items():
        yield File.generated(config, f"notebooks/{figure}", content=content)


def _expanded(nav: list) -> list:
    """The same navigation with a page an entry."""
    entries: list = []
    for entry in nav:
        ((title, inside),) = entry.items() if isinstance(entry, dict) else ((None, entry),)
        if isinstance(inside, list):
            entries.append({title: _expanded(inside)})
        elif "*" in inside:
            pages = [path.replace(".ipynb", ".md") for path in _paths(inside)]
            entries += [{title: pages}] if title else pages
        else:
            entries.append(entry)
    return entries
