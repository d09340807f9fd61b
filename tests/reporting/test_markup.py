from onebasin.reporting import markup


def test_many_axes_are_folded_and_counted():
    few = markup.axes_list(["a[0]", "b[<1>]"])
    assert few == "<code>a[0], b[&lt;1&gt;]</code>"
    many = markup.axes_list([f"layer{i}.weight[0]" for i in range(50)])
    assert "and 47 more" in many
    assert "and 30 not listed" in many
    assert "layer19" in many
    assert "layer20" not in many


def test_long_tables_are_folded_if_their_rows_have_a_name():
    rows = [["1", "2"]] * 30
    assert markup.table(["a", "<b>"], rows, ["x", "y"], "rows").startswith("<details><summary>All 30 rows</summary>")
    plain = markup.table(["a", "<b>"], rows, ["x", "y"])
    assert plain.startswith("<div class='scroll'")
    assert "&lt;b&gt;" in plain


def test_a_histogram_has_a_bar_for_each_count():
    picture = markup.histogram([0, 4, 2, 0])
    assert picture.count("<rect") == 3  # two bars, and the line in the middle
    assert 'x="25.00" y="0.00" width="22.50" height="14.00"' in picture
    assert 'x="50.00" y="7.00" width="22.50" height="7.00"' in picture
    assert markup.histogram([0, 0]).count("<rect") == 1
