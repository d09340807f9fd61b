"""Tables for notebooks."""

from onebasin.plots.tables import html_table


def test_a_header_is_there_if_it_is_given():
    head, body = "<thead><tr><th>x</th></tr></thead>", "<tbody><tr><td>1</td></tr><tr><td>2</td></tr></tbody>"
    assert html_table([("1",), ("2",)], ["x"]) == f"<table>{head}{body}</table>"
    assert html_table([("1",), ("2",)]) == f"<table>{body}</table>"


def test_text_is_not_markup():
    page = html_table([("<b>",)], ["a & b"])
    assert "<td>&lt;b&gt;</td>" in page
    assert "<th>a &amp; b</th>" in page
