"""Tables for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Cells of plain text as an HTML table.

    >>> html_table([("a", "<1>")])
    '<table><tbody><tr><td>a</td><td>&lt;1&gt;</td></tr></tbody></table>'
    """
    head = f"<thead>{_row(header, 'th')}</thead>" if header else ""
    return f"<table>{head}<tbody>{''.join(_row(row, 'td') for row in rows)}</tbody></table>"


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
