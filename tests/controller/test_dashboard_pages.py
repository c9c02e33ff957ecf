"""The pages of the dashboard in a browser: what they show, and to whom they can be read."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from controller.dashboard.site import DashboardSite
from controller.dashboard.standby import StandbySite
from tests.kit.browser import chromium
from tests.kit.watched import HOSTILE, Served, guarded, serving, taught


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Playwright waits for five seconds otherwise, which a busy machine may need for a page.
    expect.set_options(timeout=60_000)
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("models")) as served:
        yield served


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str, str]]:
    with guarded(tmp_path_factory.mktemp("closed") / "server") as found:
        yield found


@pytest.fixture
def learned(tmp_path: Path) -> Iterator[Served]:
    """A server of its own, which stops behind the page of the same test: the page asks it every second."""
    with taught(tmp_path / "models") as served:
        yield served


@contextmanager
def asking(server: Served, name: str, *, times: int = 1) -> Iterator[None]:
    """Ask a model again and again: pages show the last seconds, which go by before a busy machine has drawn them."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.1):
            server.ask(name, times=times)

    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask)
        try:
            yield
        finally:
            stop.set()
        asked.result()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of its own tab, in which nothing goes wrong."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(60_000)
    wrong: list[str] = []

    def said(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            wrong.append(message.text)

    page.on("console", said)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    context.close()
    assert wrong == []


#: Every page, by its fragment.
FRAGMENTS = ("", "timeline", "pages", "models", "model/alpha", "applications", "request/17")

#: Contrasts that WCAG 2 asks for: of text, and of what else has a meaning.
TEXT_CONTRAST = 4.5

#: Names of controls that have none, and texts whose contrast with what is behind them is too low.
FAULTS = """least => {
  const faults = [];
  const seen = element => element.checkVisibility() && element.getClientRects().length > 0;
  for (const control of document.querySelectorAll("a, button, input, select, summary, canvas, [role=img], [tabindex='0']")) {
    if (!seen(control) || control.parentElement.closest("[role=img]")) continue;
    const label = control.labels?.[0]?.textContent ?? control.getAttribute("aria-label") ?? control.textContent;
    if (!label.trim()) faults.push(`no name: ${control.outerHTML.slice(0, 120)}`);
  }
  const draw = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = text => {
    draw.clearRect(0, 0, 1, 1);
    draw.fillStyle = text;
    draw.fillRect(0, 0, 1, 1);
    return draw.getImageData(0, 0, 1, 1).data;
  };
  const light = text => {
    const [r, g, b] = [...rgba(text)].slice(0, 3).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (rgba(colour)[3] === 255) return colour;
    }
    return "white";
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let texts = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !seen(element)) continue;
    texts += 1;
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < least) faults.push(`contrast ${contrast.toFixed(2)}: ${walker.currentNode.data.slice(0, 60)}`);
  }
  if (texts < 12) faults.push(`only ${texts} texts`);
  for (const mark of ["header", "nav[aria-label]", "main", "h1", "[role=status]"])
    if (!document.querySelector(mark)) faults.push(`no ${mark}`);
  return faults;
}"""


def test_a_browser_shows_how_the_whole_is_and_every_name_as_text(
    server: Served, page: Page
) -> None:
    page.goto(server.url)
    expect(page.locator("#finding")).to_have_text("IDLE")
    assert server.ask("alpha", times=5) == ["OK"] * 5
    with asking(server, "alpha"):
        expect(page.locator("#finding")).to_have_text("WELL")
        # What a screen reader is told.
        expect(page.get_by_role("status")).to_have_text(
            "WELL: nothing is short, requests are answered in time"
        )
        expect(page.get_by_role("img", name="answered in time")).to_have_accessible_name(
            re.compile(r": [1-9][0-9.]* asked for, [1-9][0-9.]* answered in time$")
        )
        expect(page.get_by_role("link", name="alpha", exact=True)).to_be_visible()
        expect(page.get_by_role("cell", name=HOSTILE)).to_be_visible()
    assert page.title() == "Overview - Clockwright"
    assert page.locator("main b, main img").count() == page.locator(".legend b").count()


#: The page as it looks when something is wrong: harm, a warning, and both in figures.
SICK = """kind => {
  document.getElementById("banner").className = kind;
  for (const tile of document.querySelectorAll(".tile")) tile.dataset.tone = kind === "sick" ? "bad" : "warn";
  for (const cell of document.querySelectorAll("td")) cell.dataset.tone = kind === "sick" ? "bad" : "warn";
  const before = element => getComputedStyle(element, "::before").content;
  return [
    before(document.getElementById("finding")),
    before(document.querySelector(".tile dt")),
    getComputedStyle(document.getElementById("banner")).backgroundColor,
    getComputedStyle(document.querySelector(".tile")).backgroundColor,
  ];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_harm_and_a_warning_differ_by_a_sign_and_by_a_colour_that_can_be_read(
    server: Served, browser: Browser, scheme: Literal["light", "dark"]
) -> None:
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto(server.url)
    expect(page.locator("main[aria-busy=false]")).to_be_visible()
    looks = []
    for kind in ("sick", "warning"):
        # At once, so that no news changes it meanwhile.
        both = f"([kind, least]) => [({SICK})(kind), ({FAULTS})(least)]"
        look, faults = page.evaluate(both, [kind, TEXT_CONTRAST])
        assert faults == [], kind
        looks.append(look)
    for harm, warning in zip(*looks, strict=True):
        assert harm != warning
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_can_be_read_and_every_control_has_a_name(
    server: Served, browser: Browser, scheme: Literal["light", "dark"]
) -> None:
    server.ask("alpha", times=3)
    # The last one is too late, whatever the worker does.
    server.ask("beta", slo_ns=1)
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    for fragment in FRAGMENTS:
        page.goto(f"{server.url}/#/{fragment}")
        expect(page.locator("main[aria-busy=false]")).to_be_visible()
        assert page.evaluate(FAULTS, TEXT_CONTRAST) == [], fragment
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is (scheme == "light")
    context.close()


def test_the_theme_is_chosen_by_a_button_and_kept(server: Served, page: Page) -> None:
    page.goto(server.url)
    page.get_by_role("button", name="Theme: as the system").click()
    page.get_by_role("button", name="Theme: light").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    expect(page.locator("body")).to_have_css("background-color", "rgb(18, 22, 27)")


def test_the_keyboard_alone_leads_to_every_page_and_through_the_timeline(
    server: Served, page: Page
) -> None:
    page.goto(server.url)
    expect(page.locator("main[aria-busy=false]")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
    for name in ("Clockwright", "Overview", "Timeline"):
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name=name, exact=True)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Timeline")).to_be_visible()
    # A screen reader is told where it is now.
    expect(page.locator("main")).to_be_focused()
    with asking(server, "alpha"):
        expect(page.get_by_role("rowheader").first).to_be_visible()
        page.locator("canvas").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#told")).to_contain_text("EXEC of alpha for 1 request")
    expect(page.get_by_role("button", name="Go on")).to_be_visible()


def test_focus_stays_on_a_link_while_figures_change(server: Served, page: Page) -> None:
    with asking(server, "alpha"):
        page.goto(f"{server.url}/#/models")
        link = page.get_by_role("link", name="alpha", exact=True)
        link.focus()
        # It is no more the busiest, so that its row moves.
        with asking(server, "beta", times=9):
            expect(page.locator("tbody tr").first).to_contain_text("beta")
            expect(link).to_be_focused()
            page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="alpha")).to_be_visible()
    assert page.url == f"{server.url}/#/model/alpha"


def test_a_request_is_explained_at_an_address_of_its_own(server: Served, page: Page) -> None:
    server.ask("alpha", slo_ns=1)
    page.goto(f"{server.url}/#/model/alpha")
    page.locator("tbody tr", has_text="INFEASIBLE").get_by_role("link").first.click()
    expect(page.get_by_text("▲ INFEASIBLE: alpha")).to_be_visible()
    expect(page.locator(".words li").first).to_contain_text("It was refused as INFEASIBLE")
    # The bar has a scale up to the SLO, and sentences have the same units as tables.
    expect(page.locator(".scale .slo")).to_have_text(re.compile("^SLO 0 µs$"))
    expect(page.locator(".words li").first).not_to_contain_text(re.compile("[0-9] us"))
    expect(page.locator("section .facts")).to_contain_text(
        re.compile(r"at [0-9]{2}:[0-9]{2}:[0-9]{2}")
    )
    page.goto(f"{server.url}/#/request/{quote(HOSTILE)}")
    expect(page.locator(".verdict")).to_contain_text("no request")
    expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()


def test_an_application_shows_its_answers_and_what_each_context_believes(
    learned: Served, page: Page
) -> None:
    page.goto(f"{learned.url}/#/applications")
    card = page.get_by_role("region", name="app", exact=True)
    expect(card).to_contain_text("policy exp4-full, vote; as learned from all users")
    expect(card).to_contain_text("8 queries; default answers: none; refused: none")
    expect(card).to_contain_text("feedback: 6 APPLIED")
    card.get_by_role("link", name="app", exact=True).click()
    for context, believed, other in (("ann", "alpha", "beta"), ("bob", "beta", "alpha")):
        page.get_by_label("Weights of one user").fill(context)
        page.get_by_role("button", name="Show").click()
        expect(card).to_contain_text(f"as learned from {context}")
        parts = {}
        for model in (believed, other):
            row = card.locator("tbody tr", has=page.get_by_role("link", name=model, exact=True))
            parts[model] = float(row.get_by_role("cell").nth(0).inner_text().rstrip("%"))
        assert parts[believed] > 55 > 45 > parts[other], parts
        assert sum(parts.values()) == pytest.approx(100, abs=0.2)
    assert page.url == f"{learned.url}/#/applications/app?context=bob"
    assert page.evaluate(FAULTS, TEXT_CONTRAST) == []
    # From here a model's own page is one step away.
    card.get_by_role("link", name="alpha", exact=True).click()
    expect(page.get_by_role("heading", name="alpha")).to_be_visible()


def test_a_server_that_goes_away_is_said_to_be_gone_and_found_again(
    tmp_path: Path, browser: Browser
) -> None:
    context = browser.new_context()
    page = context.new_page()
    with serving(tmp_path / "first") as served:
        port = served.controller.metrics_port
        page.goto(served.url)
        expect(page.locator("#finding")).to_have_text("IDLE")
    expect(page.locator("#finding")).to_have_text("DISCONNECTED")
    expect(page.locator("#words")).to_contain_text("Trying again")
    with serving(tmp_path / "second", metrics_port=port):
        expect(page.locator("#finding")).to_have_text("IDLE", timeout=30_000)
    context.close()


def test_a_page_of_a_controller_that_stands_by_says_so_until_it_leads(
    server: Served, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    standby = StandbySite(lambda: "the one on elsewhere leads")
    monkeypatch.setattr(DashboardSite, "reply", lambda _, path, query: standby.reply(path, query))
    page.goto(server.url)
    expect(page.locator("#words")).to_contain_text("elsewhere leads")
    expect(page.locator("#finding")).to_have_text("STANDBY")
    expect(page.locator("main")).to_be_hidden()
    monkeypatch.undo()
    page.get_by_role("link", name="Pages").click()
    expect(page.locator("main")).to_be_visible()
    expect(page.locator("#finding")).not_to_have_text("STANDBY")


def test_a_key_is_asked_for_and_stays_in_its_tab(
    closed: tuple[Served, str, str], browser: Browser
) -> None:
    served, key, _ = closed
    context = browser.new_context()
    page = context.new_page()
    page.goto(served.url)
    dialog = page.get_by_role("dialog", name="A key, please")
    expect(dialog).to_contain_text("NO_CREDENTIALS")
    page.get_by_label("Key with the role").fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    page.get_by_label("Key with the role").fill(key)
    page.keyboard.press("Enter")
    expect(page.locator("#finding")).to_have_text("IDLE")
    assert context.cookies() == []
    # What takes another role says so, and the rest goes on.
    page.get_by_role("link", name="Applications").click()
    expect(page.locator("#finding")).to_have_text("NOT ALLOWED")
    page.get_by_role("link", name="Pages").click()
    expect(page.locator("#finding")).to_have_text("IDLE")
    other = context.new_page()
    other.goto(served.url)
    expect(other.get_by_role("dialog", name="A key, please")).to_be_visible()
    context.close()
