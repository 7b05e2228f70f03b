import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta
from importlib.resources import files

import pytest

from duemq_analytics import charts
from duemq_analytics.charts import Series, number, over_time, percentile_curves

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
TIMES = [START + timedelta(seconds=i) for i in range(60)]


def drawings():
    lines = [Series("send", TIMES, [float(i) for i in range(60)], colour=i) for i in range(10)]
    curves = [Series("all", (0, 50, 99, 99.9), [0.0, 1.0, 5.0, 900.0])]
    return [
        over_time("Rate", "a<b", "messages/s", lines),
        over_time("Lateness", "a<b", "ms", lines, log=True),
        over_time("Nothing", "a<b", "ms", [Series("", TIMES[:1], [0.0])], log=True),
        percentile_curves("Distribution", "a<b", "ms", curves),
    ]


@pytest.mark.parametrize("chart", drawings(), ids=lambda chart: chart.title)
def test_a_chart_is_an_image_in_the_page_s_own_colours(chart):
    root = ET.fromstring(chart.svg)
    assert root.get("role") == "img"
    assert root.get("aria-label") == f"{chart.title}, a<b"
    assert root.get("width") is None
    assert not re.findall(r"#[0-9a-f]{6}", chart.svg)
    assert "var(--s1)" in chart.svg
    assert "<style" not in chart.svg


def test_drawings_of_one_page_share_no_id():
    ids = [re.findall(r'id="([^"]+)"', chart.svg) for chart in drawings()]
    together = [name for names in ids for name in names]
    assert len(together) == len(set(together))


@pytest.mark.parametrize("name", ["g{}", "a-group-with-a-much-longer-name-{}"])
def test_many_groups_have_a_look_each_and_room_for_their_names(name):
    looks = [charts.look(number) for number in range(16)]
    assert len({(colour % charts.COLOURS_MAX, dash) for colour, dash in looks}) == 16
    lines = [Series(name.format(n), TIMES, [1.0] * 60, *look) for n, look in enumerate(looks)]
    few, many = (
        ET.fromstring(over_time("Rate", "orders", "1/s", some).svg) for some in (lines[:1], lines)
    )
    height = [float(each.get("viewBox").split()[3]) for each in (few, many)]
    text = "".join(many.itertext())
    assert all(line.label in text for line in lines)
    assert height[1] > height[0]  # the legend is not taken from the plot


@pytest.mark.parametrize("chart", drawings(), ids=lambda chart: chart.title)
def test_no_text_is_under_11_px_on_a_phone(chart):
    page = files("duemq_analytics").joinpath("report.html").read_text()
    (least_px,) = map(float, re.findall(r"svg {[^}]*min-width: ([0-9.]+)px", page))
    width = float(ET.fromstring(chart.svg).get("viewBox").split()[2])
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([0-9.]+)px", chart.svg)]
    assert sizes
    assert min(sizes) * least_px / width >= 11
    assert "overflow-x: auto" in page[page.index("figure {") :].partition("}")[0]


def test_any_name_of_a_group_is_shown_as_it_is():
    names = ["_hidden", "$\\frac{$", "<b>&amp;"]
    chart = over_time("Rate", "orders", "1/s", [Series(n, TIMES, [1.0] * 60) for n in names])
    text = "".join(ET.fromstring(chart.svg).itertext())
    assert all(name in text for name in names)


def test_a_name_that_no_group_can_have_is_cut():
    """A million characters would be drawn for minutes."""
    cut = charts.LABEL_CHARACTERS_MAX
    chart = over_time("Rate", "orders", "1/s", [Series("x" * 9_000, TIMES, [1.0] * 60)])
    (label,) = re.findall("x+…?", "".join(ET.fromstring(chart.svg).itertext()))
    assert label == "x" * (cut - 1) + "…"


def test_the_same_figures_make_the_same_drawing():
    assert [chart.svg for chart in drawings()] == [chart.svg for chart in drawings()]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.123, "0.12"), (0.5, "0.5"), (12.34, "12.3"), (1234.5, "1,234"), (-3, "-3")],
)
def test_numbers_are_for_people(value, text):
    assert number(value) == text


def test_times_without_a_zone_are_utc():
    assert charts.moment(datetime(2026, 1, 1)) == datetime(2026, 1, 1, tzinfo=UTC)
