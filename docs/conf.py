"""The book of docs/, built by Sphinx: ``make docs``. It needs no network, and reads from a file as from a server.

The source folder is the repository, so that links between docs/ and other pages are the same on a Git host and here.
The navigation is that of docs/contents.yaml.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from contents import read_contents  # noqa: E402  # behind the path that it is found on
from formulas import typeset, with_small_letters  # noqa: E402

project = "Paceline"
copyright = "the Paceline authors"  # noqa: A001  # Sphinx's own name
extensions = ["myst_parser"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = ["docs/**", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "infrastructure/README.md"]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests", "wheels", "node_modules"]
myst_heading_anchors = 4  # the anchors that Git hosts make: a link to a heading that is not there fails the build
highlight_language = "text"

html_theme = "furo"
html_title = "Paceline"
html_static_path = ["_static"]
html_extra_path = ["_root"]
html_css_files = ["book.css"]
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
html_js_files = ["book.js"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def _toctrees() -> str:
    """Returns a hidden toctree for each part of the book."""
    lines: list[str] = []
    for part in read_contents(ROOT / "docs"):
        lines += ["", "```{toctree}", ":hidden:", f":caption: {part.caption}", ""]
        lines += [f"{page.short_title} <{page.path.removesuffix('.md')}>" for page in part.pages] + ["```"]
    return "\n".join(lines) + "\n"


def _add_navigation(app: Any, name: str, source: list[str]) -> None:
    """Gives the start page its toctrees, which on a Git host would show as text."""
    del app
    if name == root_doc:
        source[0] += _toctrees()


def _show_folders(app: Any, tree: Any) -> None:
    """Shows links to folders, which a Git host can open, as text. Other links that lead nowhere stay errors."""
    page = Path(app.env.doc2path(app.env.docname))
    for node in list(tree.findall(pending_xref)):
        if node["refdomain"] is None and (page.parent / node["reftarget"]).is_dir():
            node.replace_self(node.children)


def _typeset(app: Any, tree: Any) -> None:
    """Sets blocks of formulas as MathML, and the letters of symbols in prose low and high."""
    del app
    for node in list(tree.findall(nodes.literal_block)):
        if html := typeset(node.astext()):
            node.replace_self(nodes.raw("", html, format="html"))
    for text in list(tree.findall(nodes.Text)):
        is_prose = not isinstance(text.parent, nodes.literal | nodes.literal_block | nodes.raw | nodes.title)
        html = with_small_letters(text.astext()) if is_prose else ""
        if "<su" in html:
            text.parent.replace(text, nodes.raw("", html, format="html"))


def _write_play(app: Any, error: Exception | None) -> None:
    """Writes the page of ``paceline learn play``, which a page of the book has inside (docs/_static/book.js)."""
    if error is None:
        from still_page import still_page  # here: a build that fails needs none of it

        (Path(app.outdir) / "_static" / "play.html").write_text(still_page(), encoding="utf-8")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_navigation)
    app.connect("doctree-read", _show_folders)
    app.connect("doctree-read", _typeset)
    app.connect("build-finished", _write_play)
