"""The dashboard: what it tells, to whom, and what it costs whoever does not look."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import tomllib
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from clockwright.channel import Access
from clockwright.units import NS_PER_S, ModelId
from controller.access.config import AccessConfig
from controller.access.key_file import add_key, revoke_key
from controller.access.roles import ROLE_OF, Role
from controller.app import Controller, running
from controller.catalogue import ModelState
from controller.config import ControllerConfig
from controller.core import SchedulerConfig
from controller.dashboard.live import VIEWERS_MAX, Live
from controller.dashboard.site import METHOD_OF
from controller.runtime import NoAnswerError
from tests.kit.browser import chromium
from tests.kit.processes import until
from tests.kit.scripted_worker import LoopbackWorker

T = TypeVar("T")

#: What a page made of HTML would run, and what would change its looks.
HOSTILE = '<img src=x onerror="document.title=1"><b>bold</b>'
ROW = bytes(16)


class Served:
    """A controller with a worker, in a thread."""

    def __init__(
        self, controller: Controller, worker: LoopbackWorker, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.controller = controller
        self.worker = worker
        self._loop = loop
        self.url = f"http://127.0.0.1:{controller.metrics_port}"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def ask(self, name: str, *, slo_ns: int = 30 * NS_PER_S, times: int = 1) -> list[str]:
        """Ask a model; gives "OK" or the refusals' names."""
        return self.run(self._ask(name, slo_ns, times))

    async def _ask(self, name: str, slo_ns: int, times: int) -> list[str]:
        model = self.controller.catalogue.find(name)
        assert model is not None
        return [await self._outcome(model.model_id, slo_ns) for _ in range(times)]

    async def _outcome(self, model_id: ModelId, slo_ns: int) -> str:
        runtime = self.controller.runtime
        try:
            await runtime.submit(model_id, [ROW], arrival_ns=runtime.clock(), slo_ns=slo_ns)
        except NoAnswerError as error:
            return error.refusal.value
        return "OK"


def worker_of(controller: Controller, key: str) -> LoopbackWorker:
    """A worker that says of itself what it likes."""
    worker = LoopbackWorker(controller.port, access=Access(key=key))
    worker.register.gpu_kind = HOSTILE
    return worker


@contextmanager
def serving(folder: Path, *, worker_key: str = "", **changes: Any) -> Iterator[Served]:  # noqa: ANN401
    """A controller with two models, and a worker whose answers are what it is asked."""
    for name in ("alpha", "beta"):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.onnx").write_bytes(b"onnx")
    started: list[Served] = []
    ready, over = threading.Event(), threading.Event()

    async def main() -> None:
        values: dict[str, Any] = {
            "port": 0,
            "metrics_port": 0,
            "models_dir": folder,
            "heartbeat_interval_ms": 20,
            "scheduler": SchedulerConfig(action_timeout_ns=1000 * NS_PER_S),
        }
        config = ControllerConfig(**{**values, **changes})
        async with (
            running(config) as controller,
            worker_of(controller, worker_key) as worker,
        ):
            catalogue = controller.catalogue
            while not all(  # noqa: ASYNC110  any condition, not one that signals
                catalogue.state(each) is ModelState.READY for each in catalogue.models
            ):
                await asyncio.sleep(0.005)
            started.append(Served(controller, worker, asyncio.get_running_loop()))
            ready.set()
            await asyncio.to_thread(over.wait)

    def run() -> None:
        try:
            asyncio.run(main())
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        ready.wait()
        yield started[0]
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("models")) as served:
        yield served


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
    expect(page.locator("#finding")).to_have_text("WELL")
    expect(page.get_by_role("img", name="answered in time")).to_have_accessible_name(
        re.compile(r": [1-9][0-9.]* asked for, [1-9][0-9.]* answered in time$")
    )
    expect(page.get_by_role("link", name="alpha", exact=True)).to_be_visible()
    expect(page.get_by_role("cell", name=HOSTILE)).to_be_visible()
    assert page.title() == "Overview - Clockwright"
    assert page.locator("main b, main img").count() == page.locator(".legend b").count()


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
    server.ask("alpha", times=2)
    expect(page.get_by_role("rowheader").first).to_be_visible()
    page.locator("canvas").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#told")).to_contain_text("EXEC of alpha for 1 request")
    expect(page.get_by_role("button", name="Go on")).to_be_visible()


def test_focus_stays_on_a_link_while_figures_change(server: Served, page: Page) -> None:
    server.ask("alpha", times=3)
    page.goto(f"{server.url}/#/models")
    link = page.get_by_role("link", name="alpha", exact=True)
    link.focus()
    # It is no more the busiest, so that its row moves.
    server.ask("beta", times=9)
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
    page.goto(f"{server.url}/#/request/{quote(HOSTILE)}")
    expect(page.locator(".verdict")).to_contain_text("no request")
    expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()


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


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str, str]]:
    """A server that knows its callers; a key that may look, and one that may ask for answers only."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys"
    look, infer, work = (
        add_key(keys, role.value, frozenset({role}))
        for role in (Role.STATISTICS, Role.INFERENCE, Role.WORKER)
    )
    access = AccessConfig(keys_file=keys)
    with serving(folder / "models", access=access, worker_key=work) as served:
        yield served, look, infer


def test_a_key_is_asked_for_and_stays_in_its_tab(
    guarded: tuple[Served, str, str], browser: Browser
) -> None:
    served, key, _ = guarded
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


# --- without a browser ----------------------------------------------------------------------------


def get(url: str, key: str = "", **headers: str) -> tuple[int, str]:
    """Status and what is said; of a stream only its first event."""
    asked = {name.replace("_", "-"): value for name, value in headers.items()}
    if key:
        asked["Authorization"] = f"Bearer {key}"
    try:
        with urlopen(Request(url, headers=asked), timeout=60) as answer:
            is_stream = answer.headers["Content-Type"] == "text/event-stream"
            data: bytes = answer.readline() if is_stream else answer.read()
            return answer.status, data.decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_what_says_something_takes_the_role_of_the_method_that_says_the_same(
    guarded: tuple[Served, str, str],
) -> None:
    served, look, infer = guarded
    for path in ("/", "/main.js", "/uplot/uPlot.min.css"):
        assert get(served.url + path)[0] == 200
    for path, method in METHOD_OF.items():
        assert get(served.url + path)[0] == 401, path
        assert get(served.url + path, infer)[0] == 403, path
        allowed = ROLE_OF[f"/clockwright.v1.ControlService/{method}"] is Role.STATISTICS
        assert (get(served.url + path, look)[0] == 200) is allowed, path
    assert get(f"{served.url}/look/nothing")[0] == 404


def test_a_page_of_another_site_learns_nothing(server: Served) -> None:
    for site, status in (("same-origin", 200), ("none", 200), ("cross-site", 403)):
        assert get(f"{server.url}/look/history", Sec_Fetch_Site=site)[0] == status
    assert get(f"{server.url}/look/history", Origin="http://evil.example")[0] == 403
    # A name that its owner lets point to 127.0.0.1.
    assert get(f"{server.url}/look/history", Host="evil.example:8002")[0] == 403
    with urlopen(server.url) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


def test_a_viewer_whose_key_is_revoked_sees_nothing_more(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    work = add_key(keys, "work", frozenset({Role.WORKER}))
    look = add_key(keys, "look", frozenset({Role.STATISTICS}))
    access = AccessConfig(keys_file=keys)
    with serving(tmp_path / "models", access=access, worker_key=work) as served:
        headers = {"Authorization": f"Bearer {look}"}
        with urlopen(Request(f"{served.url}/live/overview", headers=headers), timeout=60) as answer:
            assert answer.readline().startswith(b"data: ")
            revoke_key(keys, "look")
            # It ends, instead of going on for ever.
            while answer.readline():
                pass


def test_one_viewer_too_many_is_told_so_and_has_room_when_another_is_gone(server: Served) -> None:
    with ExitStack() as stack:
        streams = [
            stack.enter_context(urlopen(f"{server.url}/live/pages", timeout=60))
            for _ in range(VIEWERS_MAX)
        ]
        for stream in streams:
            assert stream.readline().startswith(b"data: ")
        status, words = get(f"{server.url}/live/pages")
        assert (status, words.startswith(f"found {VIEWERS_MAX} viewers")) == (503, True)
        streams[0].close()
        until(lambda: get(f"{server.url}/live/pages")[0] == 200, what="a place is free")


def test_nobody_looks_and_nothing_is_made_and_a_slow_viewer_gets_the_newest() -> None:
    made = 0

    async def make() -> bytes:
        nonlocal made
        made += 1
        return b"%d" % made

    async def test() -> None:
        live = Live(interval_s=0)
        quick, slow = live.watch("same", make), live.watch("same", make)
        assert made == 0
        assert await anext(slow) == b"1"
        for _ in range(20):
            last = await anext(quick)
        assert made == int(last)
        # None of the looks in between was kept.
        assert int(await anext(slow)) == made
        await quick.aclose()
        await slow.aclose()
        assert live.num_viewers == 0
        so_far = made
        for _ in range(100):
            await asyncio.sleep(0)
        assert made == so_far

    asyncio.run(test())


def test_the_past_says_of_each_second_what_was_asked_and_what_was_answered(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "models") as served:
        assert served.ask("alpha", times=3) == ["OK"] * 3
        (refused,) = served.ask("beta", slo_ns=1)

        def past(name: str = "") -> list[dict[str, Any]]:
            status, words = get(f"{served.url}/look/history?name={name}")
            assert status == 200
            seconds: list[dict[str, Any]] = json.loads(words)["seconds"]
            return seconds

        # The second that is not over is none of the past yet.
        until(lambda: sum(second["asked_rps"] for second in past()) == 4, what="the past has all")
        assert sum(second["good_rps"] for second in past()) == 3
        assert sum(second["refused_rps"].get(refused, 0) for second in past("beta")) == 1
        assert sum(second["asked_rps"] for second in past("alpha")) == 3
        assert all(0 < second["p99_share"] < 1 for second in past("alpha") if second["good_rps"])
        assert past("nobody") == [] or not any(second["asked_rps"] for second in past("nobody"))


def test_all_files_of_the_page_are_shipped() -> None:
    root = Path(__file__).parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    package = root / "controller" / "dashboard"
    shipped = {
        path
        for pattern in settings["tool"]["setuptools"]["package-data"]["controller.dashboard"]
        for path in package.glob(pattern)
    }
    assert {path for path in package.rglob("static/**/*") if path.is_file()} <= shipped
