"""The site: ``make docs`` builds it with Sphinx, and a link that leads nowhere is an error.

The pages are plain Markdown that reads on the forge as well. What the site needs beyond that is made here: the navigation,
a page for each public object, and links to files outside of ``docs``, which lead to the repository.
"""

import html
import importlib
import inspect
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from docs.make_api import INTERNAL, SECTIONS, find_hidden_bases  # noqa: E402 - the line above lets it be found
from docs.make_notebooks import PAGES, REPOSITORY, write_notebooks  # noqa: E402

NAVIGATION = {
    "Start here": ["tutorial", "which-method", "gallery", "coming-from", "glossary"],
    "I have two checkpoints": [
        "howto/merge-checkpoints",
        "howto/hugging-face",
        "howto/merge-transformers",
        "howto/port-fine-tunes",
        "howto/different-widths",
        "howto/provenance",
        "cli",
        "scale",
    ],
    "I have two modules": [
        "alignment",
        "howto/custom-objectives",
        "deep",
        "transformers",
        "symmetry",
        "howto/hand-written-symmetries",
    ],
    "I study loss landscapes": ["howto/loss-landscapes", "method", "sinkhorn", "reproduction", "performance"],
    "I do continual or federated learning": ["howto/continual-learning", "howto/federated-averaging", "continual"],
    "Look up": ["reference/index", "coverage", "howto/add-a-rule"],
    "Appendix": [
        "alignment-notes",
        "reproduction-notes",
        "deep-notes",
        "continual-notes",
        "performance-notes",
        "assignments",
        "growth",
    ],
}

project = "onebasin"
author = copyright = "The onebasin developers"
version = release = metadata.version("onebasin")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["api.md"]

myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
default_role = "py:obj"  # what stands in single backticks in a docstring
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
add_module_names = False
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "onebasin"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_js_files = ["versions.js"]
templates_path = ["templates"]
html_sidebars = {
    "**": [
        *("sidebar/brand.html", "versions.html", "sidebar/search.html"),
        *("sidebar/scroll-start.html", "sidebar/navigation.html", "sidebar/scroll-end.html"),
    ]
}
html_baseurl = f"https://onebasin.github.io/onebasin/{version}/"
html_theme_options = {
    "footer_icons": [{"name": "GitHub", "url": "https://github.com/onebasin/onebasin", "html": "GitHub", "class": ""}],
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7fb2ec", "color-brand-content": "#7fb2ec"},
}


def write_reference(app: Sphinx) -> None:
    """A page for each public object, by its docstring, an index of them, and the notebooks."""
    folder = DOCS / "reference"
    folder.mkdir(exist_ok=True)
    lines = ["# API reference", ""]
    wanted = {"index.md"}
    for title, modules in SECTIONS.items():
        names = [(module, name) for module, listed in modules.items() for name in listed]
        lines += [f"## {title}", "", "| | |", "|---|---|"]
        for module, name in names:
            page = f"{_name_page(module, name)}.md"
            wanted.add(page)
            _write(folder / page, _describe(module, name))
            lines.append(f"| [`{name}`]({page}) | {_summarise(module, name)} |")
        lines += ["", "```{toctree}", ":hidden:", "", *(_name_page(module, name) for module, name in names), "```", ""]
    _write(folder / "index.md", "\n".join(lines))
    for file in folder.glob("*.md"):
        if file.name not in wanted:
            file.unlink()
    write_notebooks(folder / "notebooks")


def _is_class(module: str, name: str) -> bool:
    return inspect.isclass(getattr(importlib.import_module(module), name))


def _name_page(module: str, name: str) -> str:
    """Some file systems do not tell Symmetry from symmetry."""
    return f"{module}.class-{name}" if _is_class(module, name) else f"{module}.{name}"


def _describe(module: str, name: str) -> str:
    directive = f".. autofunction:: {module}.{name}\n"
    if _is_class(module, name):
        thing = getattr(importlib.import_module(module), name)
        hidden = find_hidden_bases(thing)
        others = ", ".join(base.__name__ for base in thing.__mro__[1:] if base not in hidden)
        inherited = f"   :inherited-members: {others}\n" if hidden else ""
        internal = ", ".join(sorted(member.partition(".")[2] for member in INTERNAL if member.startswith(f"{name}.")))
        excluded = f"   :exclude-members: {internal}\n" if internal else ""
        directive = f".. autoclass:: {module}.{name}\n   :members:\n{inherited}{excluded}"
    return f"# {name}\n\n```{{eval-rst}}\n{directive}```\n"


def _summarise(module: str, name: str) -> str:
    first = (inspect.getdoc(getattr(importlib.import_module(module), name)) or "").split("\n\n")[0].replace("\n", " ")
    return first.replace("``", "`").replace("|", "\\|")


def _write(file: Path, text: str) -> None:
    """Only what has changed, so that a second build is quick."""
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")


def adapt_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Add the navigation to the first page, and lead links out of ``docs`` to the repository."""
    page = DOCS / f"{name}.md"
    if name == "index":
        tables = [_list_pages(title, pages) for title, pages in NAVIGATION.items()]
        source[0] = "\n".join([source[0], *tables])
    if name.startswith("reference/"):
        return
    up = "../" * name.count("/")
    if name in PAGES:
        title, _, rest = source[0].partition("\n\n")
        link = f"[This page as a notebook]({up}reference/notebooks/{Path(name).name}.ipynb)"
        source[0] = f"{title}\n\n{link}\n\n{rest}"
    named = [(module, name) for modules in SECTIONS.values() for module, names in modules.items() for name in names]
    anchors = {  # those of the headings in api.md
        f"{'class-' if _is_class(module, name) else ''}{name.lower()}": f"{up}reference/{_name_page(module, name)}.md"
        for module, name in named
    }
    source[0] = source[0].replace("```math\n", "```{math}\n")
    source[0] = re.sub(r"\]\((?:\.\./)*api\.md#([\w-]+)\)", lambda match: f"]({anchors[match[1]]})", source[0])
    source[0] = re.sub(r"\]\((?:\.\./)*api\.md\)", f"]({up}reference/index.md)", source[0])
    source[0] = re.sub(r"(!?)\[([^\]]*)\]\((\.\./[^)\s]+)\)", lambda match: _lead_out(page, match), source[0])


def _lead_out(page: Path, match: re.Match[str]) -> str:
    target, _, anchor = match[3].partition("#")
    place = (page.parent / target).resolve()
    if match[1] or DOCS in place.parents:  # pictures are copied
        return match[0]
    if not place.exists():
        raise ValueError(f"{page} links to {target}, which is not there")
    return f"[{match[2]}]({REPOSITORY}/{place.relative_to(DOCS.parent)}{'#' + anchor if anchor else ''})"


def _list_pages(title: str, pages: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])


def escape_docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Stars of shapes, ``(*batch, n)``, and bars of norms are no markup."""
    lines[:] = [line if line.lstrip().startswith((">>>", "...")) else re.sub(_MARKS, r"\\\g<0>", line) for line in lines]


_MARKS = re.compile(r"(?<=\()\*(?=\w)|(?<!`)\|(?!`)")


def shorten_signature(
    app: Sphinx, what: str, name: str, thing: object, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Defaults that have no short form, ``<factory>`` and functions, as an ellipsis: so the signature is Python."""
    return signature and re.sub(r"<[^<>]*>", "...", signature), returned


def describe_page(app: Sphinx, name: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    """Give a page the description that search engines show: its first paragraph."""
    first = next(tree.findall(nodes.paragraph), None) if tree else None
    if first is not None:
        text = html.escape(" ".join(first.astext().split())[:300])
        context["metatags"] = f'{context.get("metatags", "")}<meta name="description" content="{text}">'


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("html-page-context", describe_page)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-process-docstring", escape_docstring)
    app.connect("builder-inited", write_reference)
    app.connect("source-read", adapt_page)
