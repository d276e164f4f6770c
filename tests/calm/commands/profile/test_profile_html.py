"""The page of `calm profile`, in a real browser where what counts is what it shows."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import profile_samples as samples
import pytest
from msgspec.structs import replace
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from calm.commands.heap import html as heap_html
from calm.commands.profile import html
from calm.core import pages
from calm.core.heap_profile import TYPES, HeapProfile, numbered
from calm.core.profile_model import CAUSES, SHOOTDOWN, Cause, Frame, Profile, Stack, Timeline

FRAME = "#flame g"
# Drawn, or never to be: plotly is unpacked after the rest.
READY = "return !document.getElementById('plots') || document.querySelector('#plots .main-svg') !== null"


def quick() -> Profile:
    """Without plots, for what has nothing to do with them: plotly takes a second to load."""
    return replace(samples.listing1(), timeline=Timeline(0.0), curves={})


@dataclass
class Page:
    """A profile's page in the browser."""

    driver: webdriver.Chrome
    folder: Path

    def open(self, name: str, make: Callable[[], Profile], width: int = 1280, dark: bool = False) -> Page:
        path = self.folder / f"{name}.html"
        if not path.exists():
            path.write_text(html.page(make()))
        self.media(width, dark)
        self.driver.get(path.as_uri())
        WebDriverWait(self.driver, 20, 0.05).until(lambda driver: driver.execute_script(READY))
        return self

    def media(self, width: int, dark: bool) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str = "body") -> str:
        return self.find(selector).text

    def frames(self) -> dict[str, float]:
        """What the flame graph shows: the width of the widest frame of each name."""
        script = f"""return [...document.querySelectorAll('{FRAME}')].map(
            g => [g.getAttribute('aria-label').split(', ')[0], g.firstChild.getBoundingClientRect().width])"""
        shown: dict[str, float] = {}
        for name, width in self.js(script):
            shown[name] = max(width, shown.get(name, 0))
        return shown

    def label(self, name: str) -> str:
        """How a screen reader tells a frame."""
        return self.frame(name).get_attribute("aria-label") or ""

    def frame(self, name: str) -> WebElement:
        return self.find(f'{FRAME}[aria-label^="{name}, "]')

    def hover(self, element: WebElement) -> list[str]:
        """What the tip says. Scrolling hides it, so that comes first."""
        self.js("arguments[0].scrollIntoView({block: 'center'})", element)
        places = cycle((0, 2))

        def told(_: webdriver.Chrome) -> list[str] | Literal[False]:
            move = webdriver.ActionChains(self.driver)
            move.move_to_element_with_offset(element, next(places), 0).perform()
            text = self.text("#tip")
            return text.split("\n") if text else False

        return WebDriverWait(self.driver, 10, 0.05).until(told)

    def scrolls_one_way_only(self) -> bool:
        """Also on a telephone. Leaves the page narrow."""
        fits = []
        for width in (1280, 400):
            self.media(width, dark=False)
            extents = self.js("const e = document.documentElement; return [e.scrollWidth, e.clientWidth]")
            fits.append(extents[0] <= extents[1] <= width)
        return all(fits)

    def choose(self, kind: str) -> None:
        self.js(f"document.querySelector('input[value={kind}]').click()")

    def column(self, table: str, number: int) -> list[str]:
        return [cell.text.split("\n")[0] for cell in self.all(f"{table} tbody td:nth-child({number})")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not chromedriver:
        pytest.skip("chromium or chromium-driver is not installed: scripts/setup check installs both")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    # It is the project's own page; a sandbox within a container, or for root, cannot be had.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    try:
        yield Page(driver, tmp_path_factory.mktemp("pages"))
    finally:
        driver.quit()


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """Whatever a test does, the browser has nothing to complain of, and the page fetches nothing."""
    yield browser
    complaints = browser.driver.get_log("browser")  # type: ignore[no-untyped-call]
    assert [line for line in complaints if line["level"] in ("SEVERE", "WARNING")] == []
    assert browser.js("return performance.getEntriesByType('resource').map(entry => entry.name)") == []


def test_words_first_and_the_gravest_finding_first_of_all(page: Page) -> None:
    page.open("quick", quick)
    assert page.driver.title == "build/release/listing1 16 1000 - calm profile"
    assert page.text("h1") == "build/release/listing1 16 1000"
    assert "2 CPUs (AMD EPYC), 23.54 GiB, Debian GNU/Linux 12 (bookworm), glibc 2.36" in page.text("header")
    findings = [finding.text for finding in page.all(".findings li")]
    assert [finding.split("\n")[0] for finding in findings] == [
        "99.5 %",
        "16.0 %",
        "All 16 threads share 2 CPUs.",
    ]
    assert "Remedy: Run it under calmalloc (calm run -a calmalloc -- CMD)" in findings[0]
    assert page.find(".findings li code").text == "calm run -a calmalloc -- CMD"
    assert "Remedy" not in findings[1]
    cards = {card.text.split("\n")[0]: card.text.split("\n")[1:] for card in page.all(".cards div")}
    assert cards["TLB shootdowns"] == ["158,944", "113,361 a second"]
    assert cards["TLB interrupts sent"] == ["151,020", "1.0 for each shootdown"]
    assert cards["CPU time"] == ["2.620 s", "1.87 CPUs, 84.4 % in the kernel"]
    assert cards["CPU share"][0] == "97.0 %"
    assert cards["peak RSS"] == ["41.2 MiB", "20.0 MiB on average"]
    assert "Profiling took at most 3.40 % of the program's time." in page.text()
    assert "12 samples were lost." in page.text()
    page.find("details summary").click()
    assert "mmap calls - not counted: no tracepoint of that name" in page.text(".totals")


def test_causes_sort(page: Page) -> None:
    page.open("quick", quick)
    assert page.column("#causes", 1) == ["madvise", "munmap", "page fault", "TLB interrupts handled"]
    assert page.column("#causes", 2) == ["158,851 99.9 %", "93 0.06 %", "-", "-"]
    heading = page.find("#causes th:nth-child(5)")
    heading.find_element(By.TAG_NAME, "button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert page.column("#causes", 1) == ["madvise", "page fault", "TLB interrupts handled", "munmap"]
    heading.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert heading.get_attribute("aria-sort") == "ascending"
    assert page.column("#causes", 1) == ["munmap", "TLB interrupts handled", "page fault", "madvise"]
    page.find("#causes th:first-child button").click()
    assert heading.get_attribute("aria-sort") is None
    assert page.column("#causes", 1) == ["madvise", "munmap", "page fault", "TLB interrupts handled"]


def test_flame_graph_zooms_by_click_and_comes_back(page: Page) -> None:
    page.open("quick", quick)
    whole = page.frames()
    full = whole["all shootdowns"]
    assert full > 1000
    assert whole["free"] == pytest.approx(full * 158_211.4 / 158_944.2, rel=1e-3)
    assert whole["advise_stack_range"] == pytest.approx(full * 640.2 / 158_944.2, rel=0.01)
    assert not page.find("#reset").is_enabled()
    page.frame("advise_stack_range").click()
    zoomed = page.frames()
    assert zoomed["advise_stack_range"] == pytest.approx(full)
    assert zoomed["start_thread"] == pytest.approx(full)
    assert "shrink_heap" not in zoomed
    page.find("#reset").click()
    assert page.frames() == whole


def test_flame_graph_tells_kernel_and_inlined_apart(page: Page) -> None:
    page.open("quick", quick)
    looks = {
        name: page.js(
            "const look = getComputedStyle(arguments[0]); return look.fill + look.strokeDasharray",
            page.frame(name).find_element(By.TAG_NAME, "rect"),
        )
        for name in ("free", "shrink_heap", "do_syscall_64")
    }
    assert len(set(looks.values())) == 3, looks
    assert page.label("shrink_heap").endswith(", inlined")
    assert page.label("do_syscall_64").endswith(", kernel")


def test_flame_graph_by_keyboard(page: Page) -> None:
    page.open("quick", quick)

    def press(*keys: str) -> str:
        for key in keys:
            page.driver.switch_to.active_element.send_keys(key)
        label: str | None = page.driver.switch_to.active_element.get_attribute("aria-label")
        return (label or "").split(", ")[0]

    page.js("document.getElementById('search').focus()")
    # Reset has nothing to do, and is passed over.
    assert press(Keys.TAB) == "all shootdowns"
    assert press(Keys.ARROW_DOWN) == "start_thread"
    assert press(Keys.ARROW_DOWN, Keys.ARROW_RIGHT) == "advise_stack_range"
    assert "640 shootdowns: 0.40 % of all" in page.text("#tip")
    assert press(Keys.ENTER) == "advise_stack_range"
    assert page.frames()["advise_stack_range"] > 1000
    assert press(Keys.ARROW_UP) == "start_thread"
    assert press(Keys.HOME) == "all shootdowns"
    assert press(Keys.ESCAPE) == "all shootdowns"
    assert page.frames()["advise_stack_range"] < 10


def test_flame_graph_tells_exact_numbers(page: Page) -> None:
    page.open("quick", quick)
    assert page.hover(page.frame("heap_trim")) == [
        "heap_trim",
        "libc.so.6, inlined, arena.c:649",
        "158,211 shootdowns: 99.5 % of all",
        "1,588 samples",
    ]


def test_search_tells_the_share_each_stack_once(page: Page) -> None:
    page.open("quick", quick)
    page.find("#search").send_keys("HEAP")
    # shrink_heap is below heap_trim, and counts no second time.
    assert page.text("#matched").startswith("Matched: 99.5 % of all (158,211 shootdowns)")
    hits = page.js("return [...document.querySelectorAll('#flame .hit')].map(g => flame.name(g.node))")
    assert hits == ["heap_trim", "shrink_heap"]
    page.frame("advise_stack_range").click()
    assert page.text("#matched").endswith("0.00 % of what is zoomed")
    page.find("#search").send_keys(Keys.CONTROL, "a")
    page.find("#search").send_keys("no such function")
    assert page.text("#matched").startswith("Matched: 0.00 % of all (0 shootdowns)")
    page.find("#search").send_keys(Keys.CONTROL, "a")
    page.find("#search").send_keys(Keys.DELETE)
    assert page.text("#matched") == "158,944 shootdowns in 1,596 samples"
    assert page.all("#flame .hit, #flame .miss") == []


def test_kinds_causes_and_inversion(page: Page) -> None:
    page.open("quick", quick)
    page.choose("fault")
    assert "sysmalloc" in page.frames()
    assert page.text(".stacks:not([hidden]) h3") == "Top stacks: faults"
    assert len(page.all(".stacks:not([hidden])")) == 1
    page.choose("cpu")
    assert page.text("#matched") == "2.620 s of CPU time in 2,618 samples"
    options = [option.text for option in page.all("#cause option")]
    assert options == ["all", "madvise", "page fault", "TLB interrupts handled", CAUSES["other"]]
    Select(page.find("#cause")).select_by_visible_text("TLB interrupts handled")
    assert page.text("#matched").startswith("220.00 ms of CPU time")
    assert "flush_tlb_func" in page.frames()
    assert "free" not in page.frames()
    page.choose("shootdown")
    page.find("#inverted").click()
    shown = page.frames()
    # Every shootdown ends in the same function of the kernel.
    assert shown["flush_tlb_mm_range"] == pytest.approx(shown["all shootdowns"])
    assert page.frame("flush_tlb_mm_range").get_attribute("aria-level") == "2"


def test_top_stacks_expand(page: Page) -> None:
    page.open("quick", quick)
    row = page.find(".stacks:not([hidden]) tbody tr")
    assert row.text.startswith("158,211 99.5 % madvise")
    assert "madvise ← shrink_heap ← heap_trim ← _int_free ← free ← …" in row.text
    assert "flush_tlb_mm_range" not in row.text
    row.find_element(By.TAG_NAME, "summary").click()
    assert "flush_tlb_mm_range kernel" in row.text
    assert "heap_trim inlined libc.so.6, arena.c:649" in row.text
    page.find(".stacks:not([hidden]) th:first-child button").click()
    assert page.column(".stacks:not([hidden])", 1) == ["158,211", "640", "93"]
    page.find(".stacks:not([hidden]) th:first-child button").click()
    assert page.column(".stacks:not([hidden])", 1) == ["93", "640", "158,211"]


def test_plots_share_one_axis_and_names_switch_them(page: Page) -> None:
    page.open("listing1", samples.listing1)
    curves = "return document.getElementById('plots').data.map(d => [d.name, d.yaxis, d.xaxis, d.visible])"
    drawn = page.js(curves)
    assert [name for name, *_ in drawn] == [
        *("madvise", "munmap", "page faults", "madvise", "mmap"),
        *("user CPU", "system CPU", "RSS", "dirty", "huge pages"),
    ]
    assert {axis for _, _, axis, _ in drawn} == {"x"}
    assert [axis for _, axis, *_ in drawn] == ["y", "y", "y2", "y3", "y3", "y4", "y4", "y5", "y5", "y5"]
    # Events in a bin of 10 ms become events a second, and last until the bin ends.
    x, y = page.js("const d = document.getElementById('plots').data[0]; return [[...d.x], [...d.y]]")
    assert y[0] == pytest.approx(70_000)
    assert (len(x), len(y), x[1], y[-1]) == (141, 141, 0.01, y[-2])
    switch = page.find('#series [data-group="Calls"][data-name="madvise"]')
    switch.click()
    assert switch.get_attribute("aria-pressed") == "false"
    assert [(name, axis) for name, axis, _, seen in page.js(curves) if not seen] == [("madvise", "y3")]
    switch.click()
    assert all(seen for *_, seen in page.js(curves))
    buttons = page.js("return [...document.querySelectorAll('.modebar-btn')].map(b => b.dataset.title)")
    assert buttons == ["Download plot as a PNG", "Reset axes"]


def test_thousands_of_stacks_with_long_names(page: Page) -> None:
    page.open("large", samples.large)
    names = page.js(f"return [...document.querySelectorAll('{FRAME} text')].map(t => t.textContent)")
    assert "_M_rehash_aux(…)" in names
    # What would be narrower than a pixel is left out until its caller is zoomed.
    assert 500 < page.js(f"return document.querySelectorAll('{FRAME}').length") < 5000
    page.find("#inverted").click()
    assert 100 < page.js(f"return document.querySelectorAll('{FRAME}').length") < 5000
    assert "The heaviest 25 of 1,250 stacks" in page.text(".stacks:not([hidden])")
    assert page.scrolls_one_way_only()


def test_nothing_moves_while_plots_are_drawn(page: Page) -> None:
    early = """addEventListener("DOMContentLoaded", () => {
        const drawn = document.getElementById("plots").children.length;
        window.early = [document.documentElement.scrollHeight, drawn];
    })"""
    added = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": early})
    page.open("listing1", samples.listing1)
    page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    assert page.js("return window.early") == [page.js("return document.documentElement.scrollHeight"), 0]
    assert page.scrolls_one_way_only()


def test_dark_and_paper(page: Page) -> None:
    def brightness(script: str) -> float:
        numbers = re.findall(r"\d+", page.js(script))[:3]
        return sum(map(int, numbers)) / 3

    ground = "return getComputedStyle(document.body).backgroundColor"
    text = "return getComputedStyle(document.body).color"
    ticks = "return getComputedStyle(document.querySelector('#plots .xtick text')).fill"
    page.open("listing1", samples.listing1)
    assert brightness(ground) > 200 > 100 > max(brightness(text), brightness(ticks))
    # The plots follow when the desktop changes its mind.
    page.media(1280, dark=True)
    assert brightness(ground) < 50 < 180 < brightness(text)
    WebDriverWait(page.driver, 5).until(lambda _: brightness(ticks) > 180)
    # Paper is light, has its own width, and has the stacks of all kinds.
    page.js("dispatchEvent(new Event('beforeprint'))")
    assert brightness(ticks) < 100
    assert page.frames()["all shootdowns"] == pytest.approx(680)
    page.js("dispatchEvent(new Event('afterprint'))")
    assert brightness(ticks) > 180
    assert page.frames()["all shootdowns"] > 1000


def test_unprivileged_says_what_is_missing_and_why(page: Page) -> None:
    page.open("unprivileged", samples.unprivileged)
    assert "Without tracepoints, shootdowns and their causes are not known: not counted" in page.text(
        ".warning"
    )
    cards = {card.text.split("\n")[0]: card.text.split("\n")[1:] for card in page.all(".cards div")}
    assert cards["TLB shootdowns"][0] == "-"
    assert "needs root or CAP_PERFMON" in cards["TLB shootdowns"][1]
    assert set(page.column("#causes", 2)) == {"-"}
    assert page.find("input[value=shootdown]").get_attribute("disabled")
    assert page.text("#matched") == "159,802 faults in 1,598 samples"
    assert "Nothing stands out." in page.text()
    assert page.scrolls_one_way_only()


def test_empty(page: Page) -> None:
    page.open("empty", samples.empty)
    text = page.text()
    for words in (
        "Stopped before the program ended",
        "Nothing stands out.",
        "No cause was recorded.",
        "Nothing was recorded over time",
        "No stacks were recorded.",
        "The cost of profiling is not known.",
    ):
        assert words in text
    assert (page.folder / "empty.html").stat().st_size < 100_000
    assert page.scrolls_one_way_only()


def test_markup_in_names_is_text(page: Page) -> None:
    """A script that ran would open an alert, and every command after it would fail."""
    page.open("hostile", samples.hostile)
    assert page.text("h1") == f"sh -c '{samples.HOSTILE}'"
    assert page.driver.title == f"sh -c '{samples.HOSTILE}' - calm profile"
    assert page.js("return document.scripts.length") == 3
    assert "free" + samples.HOSTILE in page.frames()
    assert page.hover(page.frame("heap_trim" + samples.HOSTILE))[0] == "heap_trim" + samples.HOSTILE
    assert samples.HOSTILE in [option.text for option in page.all("#cause option")]
    source = (page.folder / "hostile.html").read_text()
    assert "<script>alert" not in source
    assert page.scrolls_one_way_only()


def test_without_plotly_the_rest_is_there(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    page.open("without", samples.listing1)
    assert "Plots need Python's package plotly" in page.text()
    assert "free" in page.frames()
    assert (page.folder / "without.html").stat().st_size < 100_000


def test_page_is_ascii_and_packs_plotly(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    odd = replace(samples.listing1(), command=["naïve", "\udcff", "a\x00b\u202e"])
    path.write_text(html.page(odd))
    assert path.read_bytes().isascii()
    assert path.stat().st_size < 2_500_000
    text = path.read_text()
    assert "na&#239;ve" in text
    assert "&#65533;" in text
    assert not re.search(r"""(?:src|href)=(?!"data:)""", text.split('id="plotly"')[0])


@pytest.mark.parametrize(
    ("function", "label"),
    [
        ("free", "free"),
        ("std::vector<int, std::allocator<int> >::push_back(int&&)", "std::vector<…>::push_back(…)"),
        ("f()", "f()"),
        ("(anonymous namespace)::Tablet<4>::get()", "{anonymous}::Tablet<…>::get()"),
        ("Key::operator<(Key const&) const", "Key::operator<(…) const"),
        ("Map<int>::operator()(int)", "Map<…>::operator()(…)"),
        ("Stream& operator<< <char>(Stream&)", "Stream& operator<< <…>(…)"),
        ("Pointer<T>::operator->() const", "Pointer<…>::operator->() const"),
        ("broken<int", "broken<int"),
        ("broken>)", "broken>)"),
        ("<alloc::vec::Vec<T> as core::ops::Drop>::drop", "<…>::drop"),
    ],
)
def test_short_names(function: str, label: str) -> None:
    assert pages.short(function) == label


def test_frames_that_differ_by_their_line_are_one_function(page: Page) -> None:
    frames = [
        Frame("main", "p"),
        Frame("f", "p", source="f.c:1"),
        Frame("f", "p", source="f.c:2"),
        Frame("g", "p"),
    ]
    stacks = [
        Stack(SHOOTDOWN, "munmap", (0, 1), 2.0, 1),
        Stack(SHOOTDOWN, "madvise", (0, 2, 3), 3.0, 2),
        Stack(SHOOTDOWN, "madvise", (), 1.0, 1),
        Stack(SHOOTDOWN, "madvise", (0,), 0.0, 1),
    ]
    page.open("lines", lambda: replace(samples.empty(), frames=frames, stacks=stacks))
    assert set(page.frames()) == {"all shootdowns", "main", "f", "g"}
    assert page.hover(page.frame("f"))[1:3] == ["p, f.c:1 and 1 more", "5 shootdowns: 83.3 % of all"]
    assert [option.text for option in page.all("#cause option")] == ["all", "madvise", "munmap"]


def test_causes_beyond_the_colours_are_drawn_together() -> None:
    names = ["madvise", "munmap", "mprotect", "brk", "mremap", "cow", "fork", "exit"]
    series = {f"shootdown:{name}": [float(10 - place), 0.0] for place, name in enumerate(names)}
    causes = [Cause(name, 10.0 - place) for place, name in enumerate(names)]
    data = html.collect(replace(samples.empty(), causes=causes, timeline=Timeline(0.5, series)))
    [panel] = data["panels"]
    assert [trace["name"] for trace in panel["traces"]][-2:] == ["copy-on-write", "other causes"]
    # Two a second for each event of a bin of half a second: 4 and 3 of fork and exit.
    assert panel["traces"][-1]["y"] == [14.0, 0.0]


def test_heap_profile(page: Page) -> None:
    """The page of `calm heap`: its amounts are bytes, blocks and times, and there are no causes."""
    main, parse, store = (Frame(name, "server") for name in ("main", "parse", "Cache::store(int)"))
    stacks = {
        (main, parse): [1000, 64 << 20, 0, 0, 10, 640 << 10, 2_000_000, 0],
        (main, store): [100, 10 << 20, 90, 9 << 20, 100, 10 << 20, 30_000_000_000, 5_400_000_000_000],
    }
    frames, found = numbered(stacks)
    heap = HeapProfile(command=["./server"], types=list(TYPES), frames=frames, stacks=found)
    path = page.folder / "heap.html"
    path.write_text(heap_html.page(heap, "alloc_space"))
    page.media(1280, dark=False)
    page.driver.get(path.as_uri())
    assert page.driver.title == "./server - calm heap"
    assert page.label("main") == "main, 74.0 MiB of memory allocated, 100.0 %"
    assert page.text("#matched") == "74.0 MiB of memory allocated"
    assert not page.find("#cause").is_displayed()
    assert page.column(".stacks[data-kind=alloc_space]", 1) == ["64.0 MiB", "10.0 MiB"]
    page.choose("inuse_objects")
    assert page.label("Cache::store(int)").startswith("Cache::store(int), 90 blocks in use, 100.0 %")
    page.choose("freed_lifetime")
    assert page.label("main").startswith("main, 30.002 s of lifetimes of freed blocks")
    assert page.hover(page.frame("main"))[1:] == [
        "server",
        "30.002 s of lifetimes of freed blocks: 100.0 % of all",
    ]
    assert page.scrolls_one_way_only()
