"""The page in a real browser, opened from disk: silent, sortable, readable, within its width."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser, BrowserError, Tab, find_browser
from test_report import make_run

from pwfn import Config
from pwfn.evaluate.inspect import TensorFacts, inspect
from pwfn.report import write

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium on this machine (Debian: apt install chromium)"
)

LOUD = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs; the second has a long name that cannot be broken."""
    root = tmp_path_factory.mktemp("runs")
    long = "a_name_without_any_place_to_break_it_" * 4
    return [make_run(root / "first"), make_run(root / long, Config.preset("paper"))]


@pytest.fixture(scope="module")
def pages(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    write(folders[:1], root / "one.html")
    write(folders, root / "several.html")
    return {name: root / f"{name}.html" for name in ("one", "several")}


@pytest.mark.parametrize("name", ["one", "several"])
def test_it_opens_from_disk_without_messages_and_requests_nothing(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    tab = browser.open(pages[name], width=1440)
    assert tab.events(*LOUD) == []
    asked = [event["request"]["url"] for event in tab.events("Network.requestWillBeSent")]
    assert asked == [pages[name].resolve().as_uri()]
    assert tab.value("document.compatMode") == "CSS1Compat"


def test_injected_elements_neither_run_nor_are_fetched(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    """Without the policy they would be, which shows that the test above can fail."""
    injected = "<script>document.title = 'taken'</script><img src='other.png' onerror='document.title = 1'>"
    text = pages["one"].read_text(encoding="utf-8")
    guarded, unguarded = tmp_path / "guarded.html", tmp_path / "unguarded.html"
    guarded.write_text(text.replace("<main>", f"<main>{injected}"), encoding="utf-8")
    start = text.index('<meta http-equiv="Content-Security-Policy"')
    bare = text[:start] + text[text.index(">", start) + 1 :]
    unguarded.write_text(bare.replace("<main>", f"<main>{injected}"), encoding="utf-8")

    tab = browser.open(guarded, width=1440)
    assert tab.value("document.title") == "digits_resnet – pwfn report"
    # Blocked requests are announced and then fail by the policy.
    blocked = {e["requestId"] for e in tab.events("Network.loadingFailed") if e.get("blockedReason")}
    sent = [e for e in tab.events("Network.requestWillBeSent") if e["requestId"] not in blocked]
    assert [event["request"]["url"] for event in sent] == [guarded.resolve().as_uri()]
    assert tab.events(*LOUD) != []

    tab = browser.open(unguarded, width=1440)
    assert tab.value("document.title") in ("taken", "1")
    asked = [event["request"]["url"] for event in tab.events("Network.requestWillBeSent")]
    assert (tmp_path / "other.png").resolve().as_uri() in asked


OVERFLOWING = """
[...document.querySelectorAll("body *")].filter((each) => {
  const box = each.getBoundingClientRect();
  const within = (b) => b.right <= innerWidth + 0.5 && b.left >= -0.5;
  if (box.width === 0 || box.height === 0 || within(box)) return false;
  for (let up = each.parentElement; up; up = up.parentElement) {
    const scrolls = getComputedStyle(up).overflowX !== "visible";
    if (scrolls && within(up.getBoundingClientRect())) return false;
  }
  return true;
}).map((each) => each.outerHTML.slice(0, 120))
"""


def assert_within(tab: Tab, width: int) -> None:
    assert tab.value("innerWidth") == width
    assert tab.value("document.scrollingElement.scrollWidth") <= width
    assert tab.value(OVERFLOWING) == []


@pytest.mark.parametrize("name", ["one", "several"])
@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_overflows(browser: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    tab = browser.open(pages[name], width=width)
    assert_within(tab, width)
    tab.value("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert_within(tab, width)
    tab.value("document.querySelector('h1').style.cssText = 'width: 2000px'")
    assert tab.value(OVERFLOWING) != []  # the check can fail


@pytest.mark.parametrize("name", ["one", "several"])
def test_accuracy_against_size_is_seen_whole_on_a_phone(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    tab = browser.open(pages[name], width=390)
    plot = "document.querySelector('#figure-accuracy .plot')"
    assert tab.value(f"{plot}.scrollWidth <= {plot}.clientWidth")
    other = "document.querySelector('#figure-rounds .plot')"
    assert not tab.value(f"{other}.scrollWidth <= {other}.clientWidth")  # the check can fail


CONTRASTS = """
(() => {
  const light = (text) => {
    const parts = text.match(/[\\d.]+/g).map(Number).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const ground = (each) => {
    for (let up = each; up; up = up.parentElement) {
      const color = getComputedStyle(up).backgroundColor;
      if (!color.startsWith("rgba(0, 0, 0, 0")) return color;
    }
  };
  const selector = "h1, h2, p, a, dt, dd, th, td, code, summary, figcaption, th button, footer";
  return [...document.querySelectorAll(selector)].map((each) => {
    const [a, b] = [light(getComputedStyle(each).color), light(ground(each))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  });
})()
"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_stands_out_from_its_ground(browser: Browser, pages: dict[str, Path], dark: bool) -> None:
    """At least 4.5 : 1 (WCAG 2, AA)."""
    tab = browser.open(pages["one"], width=1440, dark=dark)
    found = tab.value(CONTRASTS)
    assert len(found) > 100
    assert min(found) >= 4.5
    ground = tab.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 3 * 60) is dark


def test_every_figure_has_an_accessible_name(browser: Browser, pages: dict[str, Path]) -> None:
    tab = browser.open(pages["one"], width=1440)
    tab.call("Accessibility.enable")
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    images = [n for n in nodes if n.get("role", {}).get("value") in ("image", "img") and "name" in n]
    named = [node["name"]["value"] for node in images]
    assert len(named) == tab.value("document.querySelectorAll('figure').length") >= 7
    assert all(len(name) > 20 for name in named)
    assert len(set(named)) == len(named)


# The table of layers

LAYERS = "#layers table[data-sortable]"


def column(tab: Tab, place: int) -> list[str]:
    rows = f"[...document.querySelector({json.dumps(LAYERS)}).tBodies[0].rows]"
    found: list[str] = tab.value(f"{rows}.map(row => row.cells[{place}].textContent)")
    return found


def sorting(tab: Tab) -> list[str | None]:
    heads = f"[...document.querySelector({json.dumps(LAYERS)}).tHead.rows[0].cells]"
    found: list[str | None] = tab.value(f"{heads}.map(head => head.getAttribute('aria-sort'))")
    return found


def click_head(tab: Tab, place: int) -> None:
    head = f"document.querySelectorAll({json.dumps(LAYERS + ' thead button')})[{place}]"
    tab.value(f"{head}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    x, y = tab.value(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({head}.getBoundingClientRect())")
    tab.click(x, y)


KEYS: list[tuple[int, Any]] = [
    (3, lambda t: t.weights),
    (4, lambda t: t.entropy_bits),
    (7, lambda t: t.index_bytes + t.table_bytes),
]


@pytest.mark.parametrize(("place", "key"), KEYS, ids=["weights", "bits", "bytes"])
def test_numbers_are_sorted_by_a_click(
    browser: Browser, pages: dict[str, Path], folders: list[Path], place: int, key: Any
) -> None:
    tensors: list[TensorFacts] = list(inspect(folders[0] / "model.pwfn", zstd=False).tensors)
    tab = browser.open(pages["one"], width=1440)
    assert column(tab, 1) == [t.name for t in tensors]
    assert sorting(tab) == [None] * 8
    click_head(tab, place)
    # Equal rows keep their order in both directions.
    assert column(tab, 1) == [t.name for t in sorted(tensors, key=lambda t: -key(t))]
    assert sorting(tab) == [None] * place + ["descending"] + [None] * (7 - place)
    click_head(tab, place)
    assert column(tab, 1) == [t.name for t in sorted(tensors, key=key)]
    assert sorting(tab)[place] == "ascending"
    click_head(tab, 0)
    click_head(tab, 0)
    assert column(tab, 1) == [t.name for t in tensors]  # the order of the network
    assert sorting(tab) == ["ascending"] + [None] * 7


def test_the_table_is_sorted_by_keyboard_alone(browser: Browser, pages: dict[str, Path]) -> None:
    tab = browser.open(pages["one"], width=1440)
    before = column(tab, 1)
    for _ in range(200):
        tab.press("Tab", 9)
        if tab.value(f"document.activeElement.matches({json.dumps(LAYERS + ' thead button')})"):
            break
    tab.press("Tab", 9)
    assert tab.value("document.activeElement.textContent") == "Name"
    assert tab.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.press("Enter", 13, "\r")
    assert column(tab, 1) == sorted(before)
    assert sorting(tab)[1] == "ascending"
    tab.press(" ", 32, " ")
    assert column(tab, 1) == sorted(before, reverse=True)
    assert sorting(tab)[1] == "descending"
    assert tab.value("document.activeElement.textContent") == "Name"  # the focus stays


def test_rows_without_a_number_are_last_in_both_orders(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    rows = [("a", 2.0), ("b", None), ("c", -1.5), ("d", 10.0)]
    body = "".join(
        f"<tr><th>{name}</th><td{'' if value is None else f' data-value={value}'}>?</td></tr>"
        for name, value in rows
    )
    own = (
        '<table id="own" data-sortable><thead><tr><th>N</th><th class="number">V</th></tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )
    path = tmp_path / "own.html"
    text = pages["one"].read_text(encoding="utf-8")
    path.write_text(text.replace("<main>", f"<main>{own}"), encoding="utf-8")
    tab = browser.open(path, width=1440)
    order = "[...document.querySelectorAll('#own tbody th')].map(e => e.textContent).join('')"
    for expected in ("dacb", "cadb"):
        tab.value("document.querySelectorAll('#own button')[1].click()")
        assert tab.value(order) == expected


# Paper


def test_on_paper_everything_is_unfolded_black_on_white_and_folded_again(
    browser: Browser, pages: dict[str, Path]
) -> None:
    tab = browser.open(pages["several"], width=1440, dark=True)
    closed = "document.querySelectorAll('details:not([open])').length"
    folded = tab.value(closed)
    not_printed = tab.value("document.querySelectorAll('figure details, details.settings').length")
    assert folded > not_printed > 5
    tab.value("dispatchEvent(new Event('beforeprint'))")
    assert tab.value(closed) == not_printed
    tab.shape(794, 1123, dark=True, printed=True)  # A4
    assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.value("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    for selector in ("nav", "figure details", "details.settings"):
        assert tab.value(f"getComputedStyle(document.querySelector({selector!r})).display") == "none"
    assert_within(tab, 794)
    tab.value("dispatchEvent(new Event('afterprint'))")
    assert tab.value(closed) == folded
    assert base64.b64decode(tab.call("Page.printToPDF")["data"]).startswith(b"%PDF-")


# The browser itself


def test_a_picture_has_the_requested_width_and_the_height_of_the_page(
    browser: Browser, pages: dict[str, Path]
) -> None:
    tab = browser.open(pages["one"], width=390)
    whole, part = (struct.unpack(">II", tab.picture(selector)[16:24]) for selector in (None, ".tiles"))
    height = tab.value("document.documentElement.getBoundingClientRect().height")
    assert whole == (390, pytest.approx(height, abs=1))
    assert part[0] < 390
    assert part[1] < whole[1]


def test_mistakes_of_the_page_are_errors(browser: Browser, pages: dict[str, Path]) -> None:
    tab = browser.open(pages["one"], width=390)
    with pytest.raises(BrowserError, match="no_such_thing"):
        tab.value("no_such_thing")
    with pytest.raises(BrowserError, match=r"Page\.fly"):
        tab.call("Page.fly")
