import re
from datetime import timedelta
from xml.etree import ElementTree as ET

from duemq_analytics.page.strips import LEVELS, NAMES_MAX, strips
from tests.unit.trace_analytics.page.made_rows import MINUTE

LENGTH = timedelta(minutes=1)


def cells_of(svg):
    """Level of each column."""
    found = {}
    for path in ET.fromstring(svg).iter("path"):
        level = int(path.get("class").removeprefix("l"))
        found |= {int(x): level for x in re.findall(r"M(\d+) 0h1v1h-1z", path.get("d"))}
    return found


def made(cells, **options):
    cells = {n: {MINUTE + i * LENGTH: v for i, v in each.items()} for n, each in cells.items()}
    totals = {name: max(each.values()) for name, each in cells.items()}
    return strips("Errors", cells, totals, LENGTH, str, **options)


def test_a_cell_is_where_and_as_dark_as_its_value_is():
    (strip,) = made({"g": {0: 8.0, 1: 0.0, 3: 4.0, 4: 0.01}}).strips
    assert cells_of(strip.svg) == {0: LEVELS, 3: 1 + round(0.5 * (LEVELS - 1)), 4: 1}
    assert ET.fromstring(strip.svg).get("viewBox") == "0 0 5 1"


def test_shades_of_logarithms_tell_small_values_apart():
    found = made({"g": {0: 1.0, 1: 10.0, 2: 100.0}}, log=True)
    assert list(cells_of(found.strips[0].svg).values()) == [1, 1 + round((LEVELS - 1) / 2), LEVELS]
    assert found.scale == "Palest 1.0, fullest 100.0, by the logarithm."


def test_all_strips_are_over_the_same_time_and_the_worst_comes_first():
    found = made({"few": {2: 1.0}, "many": {0: 9.0}, "none": {1: 0.0}})
    assert [strip.label for strip in found.strips] == ["many", "few", "none"]
    assert [cells_of(strip.svg) for strip in found.strips] == [{0: LEVELS}, {2: 2}, {}]
    assert list(found.times) == ["01-01 12:00", "01-01 12:01", "01-01 12:03"]


def test_names_are_bounded_and_may_be_anything():
    found = made({f'<"{number}&': {0: float(number)} for number in range(NAMES_MAX + 3)})
    assert (len(found.strips), found.left_out) == (NAMES_MAX, 3)
    assert ET.fromstring(found.strips[0].svg).get("aria-label") == 'Errors: <"42&, 42.0'
