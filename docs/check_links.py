"""Follow every link inside a built site: to its file and, where it has one, to its anchor. Pages elsewhere are not read.

python docs/check_links.py build/site/1.0.0

`make docs` runs it after Sphinx, whose own check does not see links in raw HTML or in the templates. This needs the standard
library alone.
"""

import argparse
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag links to, and what it is called."""
        for name, value in attrs:
            if name in ("href", "src") and value is not None and (tag, name) != ("link", "href"):
                self.links.add(value)
            elif name == "id" and value is not None:
                self.anchors.add(value)


def find_dead_links(site: Path) -> list[str]:
    """'PAGE: LINK' for each link that leads nowhere; a link to the folder above the site leads to its other versions."""
    site = site.resolve()
    pages = {file: _Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    dead = []
    for file, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("data:"):
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if target == site.parent:
                continue
            if target.is_dir():
                target /= "index.html"
            known = pages[target].anchors if target in pages else {unquote(parts.fragment)}
            if not target.is_file() or unquote(parts.fragment) not in known:
                dead.append(f"{file.relative_to(site)}: {link}")
    return dead


def main() -> None:
    """Check the site that is named; exit code 1 if a link is dead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    site = parser.parse_args().site
    dead = find_dead_links(site)
    if dead:
        raise SystemExit("\n".join(["these links lead nowhere:", *dead]))


if __name__ == "__main__":
    main()
