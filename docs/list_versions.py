"""List the versions of the site: each is a folder, and beside them stand versions.json and a page that leads to the latest.

python docs/list_versions.py build/site

The list in the sidebar of every page reads versions.json, so older versions learn of newer ones. This needs the standard
library alone.
"""

import argparse
import json
import re
from pathlib import Path

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(\w*)")
_REDIRECT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>onebasin</title>
<meta http-equiv="refresh" content="0; url={0}/index.html">
<link rel="canonical" href="{0}/index.html">
<a href="{0}/index.html">The documentation of onebasin {0}</a>
</html>
"""


def list_versions(site: Path) -> None:
    """Write versions.json and index.html into the folder that holds the versions.

    Raises:
        ValueError: if there is no version in it.
    """
    found = [match for folder in site.iterdir() if folder.is_dir() and (match := _VERSION.fullmatch(folder.name))]
    if not found:
        raise ValueError(f"no folder of {site} is named like a version, such as 1.0.0")
    versions = [match[0] for match in sorted(found, key=_order, reverse=True)]
    finished = [match[0] for match in found if not match[4]]
    latest = next((name for name in versions if name in finished), versions[0])
    (site / "versions.json").write_text(json.dumps({"latest": latest, "versions": versions}) + "\n", encoding="utf-8")
    (site / "index.html").write_text(_REDIRECT.format(latest), encoding="utf-8")


def _order(version: re.Match[str]) -> tuple[int, int, int, bool, str]:
    """By number; a release candidate comes before its release."""
    return int(version[1]), int(version[2]), int(version[3]), not version[4], version[4]


def main() -> None:
    """List what is in the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    list_versions(parser.parse_args().site)


if __name__ == "__main__":
    main()
