"""The report's page as a browser shows it: on a phone and on a screen, light and dark."""

from pathlib import Path

import pytest

from tests.page.content import GROUPS

LEAST_PX = 11
CONTRAST_OF_TEXT, CONTRAST_OF_SHAPES = 4.5, 3.0
"""WCAG 2, level AA."""
PHONE, SCREEN = 390, 1_280
DRAWING = "<svg viewBox='0 0 518 99'>"
CHECKS = Path(__file__).with_name("checks.js").read_text()


@pytest.fixture(params=[PHONE, SCREEN], ids=["phone", "screen"])
def width(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["light", "dark"])
def dark(request):
    return request.param


@pytest.fixture
def shown(browser, html, width, dark, pictures):
    browser.show(html.as_uri(), width, dark=dark)
    if pictures is not None:
        browser.picture(pictures / f"{width}-{'dark' if dark else 'light'}.png")
    browser.ask(CHECKS)
    browser.ask("openAll()")
    return browser


def test_it_can_be_read(shown):
    found = {
        "small": shown.ask(f"smallTexts({LEAST_PX})"),
        "pale texts": shown.ask(f"paleTexts({CONTRAST_OF_TEXT})"),
        "pale shapes": shown.ask(f"paleShapes({CONTRAST_OF_SHAPES})"),
        "too wide": shown.ask("overflows()"),
        "unreadable": shown.ask("unreadable()"),
    }
    assert found == {check: [] for check in found}


def test_sixteen_groups_have_a_strip_each_with_name_and_room(shown):
    figures = shown.ask("stripsOf()")
    assert len(figures) == 5  # rate, errors, their share, end to end, processing
    for rows in figures:
        names = " ".join(name for name, _ in rows)
        assert all(group in names for group in GROUPS)
        assert min(width for _, width in rows) >= 150


@pytest.mark.parametrize("width", [PHONE], indirect=True)
def test_it_is_one_file_without_a_script(shown):
    assert shown.ask("performance.getEntriesByType('resource').map((each) => each.name)") == []
    assert shown.ask("document.scripts.length") == 0
    assert shown.ask("document.querySelectorAll('.journey').length") == 15


@pytest.mark.parametrize("dark", [False], indirect=True)
@pytest.mark.parametrize(
    ("html_of_it", "check", "said"),
    [
        ("<b style='font-size: 10px'>tiny</b>", f"smallTexts({LEAST_PX})", '10.0 px: "tiny"'),
        ("<b style='color: #999'>pale</b>", f"paleTexts({CONTRAST_OF_TEXT})", '2.66: "pale"'),
        ("<div style='width: 2000px'>wide</div>", "overflows()", "the page is 2020 px wide"),
        (
            f"<figure>{DRAWING}<path d='M0 0h9' stroke='#f0e0d0'/></svg></figure>",
            f"paleShapes({CONTRAST_OF_SHAPES})",
            '1.29: <path d="M0 0h9" stroke="#f0e0d0"></path>',
        ),
        (
            f"<figure>{DRAWING}<text y='20'>one</text><text y='22'>two</text></svg></figure>",
            "unreadable()",
            '"one" upon "two"',
        ),
        (
            f"<figure>{DRAWING}<text x='510' y='20'>cut</text></svg></figure>",
            "unreadable()",
            'cut off: "cut"',
        ),
        (
            f"<figure>{DRAWING}<text y='20' font-size='8'>far</text></svg></figure>",
            f"smallTexts({LEAST_PX})",
            '8.0 px: "far"',
        ),
    ],
)
@pytest.mark.parametrize("width", [PHONE], indirect=True)
def test_the_checks_find_what_is_wrong(shown, html_of_it, check, said):
    shown.ask(f"document.querySelector('main').insertAdjacentHTML('beforeend', {html_of_it!r})")
    assert said in shown.ask(check)
