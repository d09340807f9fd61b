import re
from xml.etree import ElementTree

import pytest

from onebasin.engines.clock import Span
from onebasin.engines.timeline import Timeline
from onebasin.reporting import Report, render
from onebasin.reporting.timeline_section import render_timeline


@pytest.fixture
def timeline():
    found = Timeline()
    found.add("worker 1", [Span("read", 0.0, 2.0), Span("score", 2.0, 10.0), Span("write", 14.0, 16.0)])
    found.add("host-with-a-long-name <b> 123456", [Span("score", 1.0, 3.0), Span("assign", 5.0, 16.0)])
    return found


def test_each_worker_has_a_row_and_each_kind_its_seconds(timeline):
    page = render_timeline(timeline)
    picture = ElementTree.fromstring(re.search(r"<svg class=.timeline.*?</svg>", page, re.DOTALL)[0])
    rows = picture.findall("g")
    assert [row.find("title").text for row in rows] == ["worker 1", "host-with-a-long-name <b> 123456"]
    colors = [[path.attrib["fill"] for path in row.findall("path")] for row in rows]
    assert colors == [["var(--line-5)", "var(--line-0)", "var(--line-2)"], ["var(--line-0)", "var(--line-1)"]]
    assert re.findall(r"<td class='number' data-label='seconds'>(.*?)</td>", page) == ["2.0", "10.0", "11.0", "2.0"]
    assert "16 s" in page or "15 s" in page or "14 s" in page
    assert "<b>" not in page


def test_nothing_is_drawn_where_no_time_was_recorded():
    assert render_timeline(None) == render_timeline(Timeline()) == ""


def test_a_report_has_the_section_and_follows_the_theme(timeline):
    page = render(Report("Two networks", timeline=timeline))
    assert "<h2>Where the time went</h2>" in page
    assert not re.findall(r"fill=\"#", page)  # colours come from the style sheet, which has those of dark pages too
    assert set(re.findall(r"var\((--[\w-]+)\)", render_timeline(timeline))) <= set(re.findall(r"(--[\w-]+):", page))
