"""The report in a real browser, without a network: what is drawn, hovered, zoomed, switched and
printed.

Needs playwright and a Chromium, which `make test-browser` sees to; the page's structure is tested
without them in test_report.py.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from kit.reported import EVIL

from compiled_fsdp.inspection.check import load
from compiled_fsdp.inspection.report.page import unpacked
from compiled_fsdp.report import write_report

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: make test-browser"
)

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
VIEWPORT: Any = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """CHROMIUM, one on the path, or the one that playwright fetched."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with playwright.sync_playwright() as tool:
        if path is None and not os.path.exists(tool.chromium.executable_path):
            pytest.skip(
                f"no Chromium: none of {', '.join(NAMES)} is on the path, nor did playwright fetch "
                "one"
            )
        found = tool.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def file(dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the dump."""
    path: Path = tmp_path_factory.mktemp("browser") / "page.html"
    write_report(dump, path)
    return path


class Seen:
    """A page under test, and what it must not do: log, raise, ask for anything but itself, open a
    dialogue.
    """

    def __init__(self, browser: Any, file: Path, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport=VIEWPORT, color_scheme=scheme, offline=True)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on(
            "request",
            lambda request: (
                self.wrong.append(request.url) if request.url != file.as_uri() else None
            ),
        )
        self.page.on("dialog", lambda dialog: self.wrong.append(f"dialog: {dialog.message}"))
        self.page.goto(file.as_uri())
        self.page.get_by_role("tab").first.wait_for()

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()

    def data(self) -> Any:
        return unpacked(self.page.locator("#data").text_content())


@pytest.fixture
def seen(browser: Any, file: Path) -> Iterator[Seen]:
    found = Seen(browser, file)
    yield found
    found.context.close()
    assert found.wrong == []


def test_every_collective_is_drawn(seen: Seen) -> None:
    """In both graphs, predicted and measured, each with a box of its own inside the drawing."""
    page, graphs = seen.page, seen.data()["ranks"][0]["graphs"]
    assert page.locator("h2").first.is_visible()
    drawings = page.locator("svg.timeline")
    assert drawings.count() == len(graphs) == 2
    for drawing, graph in zip(drawings.all(), graphs, strict=True):
        outer = drawing.bounding_box()
        for source in ("predicted", "measured"):
            bars = drawing.locator(f".source-{source} .wire-lane .bar")
            assert bars.count() == len(graph["timeline"]["collectives"])
            for bar in bars.all():
                box = bar.bounding_box()
                assert box["width"] >= 1.99  # however short it is
                assert (
                    outer["x"]
                    <= box["x"]
                    <= box["x"] + box["width"]
                    <= outer["x"] + outer["width"] + 1
                )
            assert drawing.locator(f".source-{source} .compute-lane .unit").count() > 0
        for words in ("predicted", "measured", "training thread", "wire"):
            assert drawing.get_by_text(words, exact=True).first.is_visible()
        assert re.search(r"\d (ms|s)", drawing.locator(".axis").text_content())
        exposed = sum(t["exposed"] > 0 for t in graph["timeline"]["plain"]["times"])
        assert drawing.locator(".source-predicted .waits").count() == exposed > 0


def test_assumed_costs_are_said(seen: Seen) -> None:
    assert seen.page.get_by_text("Predicted times rest on assumed costs").is_visible()


def test_what_was_measured_comes_first(seen: Seen) -> None:
    """A sentence, then what the profiled step took; the prediction says how far off it is."""
    page, step = seen.page, seen.data()["ranks"][0]["step"]
    assert re.match(r".* % of the step waits", page.locator("#headline").text_content())
    tiles = page.locator(".tile").all_text_contents()
    assert tiles[0].startswith("profiled step")
    assert f"{round(100 * step['waiting'] / step['total'])} %" in tiles[1]
    (predicted,) = (text for text in tiles if text.startswith("predicted forward and backward"))
    assert "of it exposed; measured" in predicted


def test_every_rank_is_on_one_axis(seen: Seen) -> None:
    page, ranks = seen.page, seen.data()["ranks"]
    drawing = page.locator("svg.step")
    assert drawing.locator(".rank").count() == len(ranks) == 2
    for rank, drawn in zip(ranks, drawing.locator(".rank").all(), strict=True):
        assert drawn.locator(".part-backward").count() == 1
        assert drawn.locator(".waiting").count() == len(rank["step"]["waits"])
    assert re.search(r"Rank \d ends last, .* after the first; rank \d waits", page.content())
    drawing.locator(".part-forward").first.hover()
    assert "of the step" in page.locator("#tip").text_content()


def test_names_are_text(seen: Seen) -> None:
    """A module called like markup: nothing runs, nothing is loaded, every tab shows it as it is."""
    page = seen.page
    for name, where in (
        ("Timeline", ".collectives"),
        ("Buckets", ".buckets"),
        ("Memory", ".owners"),
    ):
        seen.tab(name)
        assert page.locator(where).first.get_by_text(EVIL).first.is_visible(), name
    seen.tab("Passes")
    for box in page.locator("details").all():
        box.locator("summary").first.click()
    assert EVIL in page.locator("#main").text_content()
    assert page.locator("img").count() == 0


def test_hover_and_choice(seen: Seen) -> None:
    """A tip names unit, parameters and bytes; a click keeps it, marks the row, and draws where it
    starts and is awaited.
    """
    page = seen.page
    bar = page.locator("svg.timeline").first.locator(".source-predicted .bar").first
    bar.hover()
    tip = page.locator("#tip")
    assert tip.is_visible()
    for words in (
        "all-gather of first",
        "first.0.weight [64, 32] 8.19 kB",
        "ranks 0, 1",
        "awaited at",
    ):
        assert words in tip.text_content()
    bar.click()
    assert page.locator(".detail").first.get_by_text("first.0.weight").first.is_visible()
    assert page.locator("svg.timeline").first.locator(".link").count() == 4
    rows = page.locator("table.collectives").first.locator("tbody tr")
    assert "is-selected" in rows.first.get_attribute("class")
    rows.nth(1).click()
    assert EVIL in page.locator(".detail").first.text_content()
    page.mouse.move(5, 5)
    assert not tip.is_visible()


def scale(seen: Seen) -> float:
    """Pixels for a millisecond, by the first two ticks of the first drawing."""
    axis = seen.page.locator("svg.timeline").first.locator(".axis")
    places = [float(line.get_attribute("x1")) for line in axis.locator("line").all()[:2]]
    values = [
        float(text.removesuffix(" ms")) for text in axis.locator("text").all_text_contents()[:2]
    ]
    return (places[1] - places[0]) / (values[1] - values[0])


def test_zoom(seen: Seen) -> None:
    """By buttons, keys, the wheel and dragging; double-click shows all again."""
    page, drawing = seen.page, seen.page.locator("svg.timeline").first
    drawing.scroll_into_view_if_needed()
    section = page.locator("section.graph").first
    before = scale(seen)
    section.get_by_label("zoom in").click()
    assert scale(seen) == pytest.approx(2 * before)
    section.get_by_label("show all").click()
    assert scale(seen) == pytest.approx(before)
    box = drawing.bounding_box()
    page.mouse.move(box["x"] + 119, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 30, steps=4)
    assert drawing.locator(".brush").count() == 1
    page.mouse.up()
    assert drawing.locator(".brush").count() == 0
    assert scale(seen) > 2 * before
    drawing.dblclick(position={"x": 20, "y": 8})
    assert scale(seen) == pytest.approx(before)
    drawing.focus()
    page.keyboard.press("+")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("0")
    assert scale(seen) == pytest.approx(before)
    page.mouse.move(box["x"] + 119, box["y"] + 30)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    page.wait_for_timeout(200)
    assert scale(seen) == pytest.approx(before / 0.8)


def test_sorting(seen: Seen) -> None:
    """By a click on a heading, and the other way round by a second."""
    table = seen.page.locator("table.collectives").nth(1)
    table.get_by_role("button", name="bytes").click()
    numbers = table.locator("tbody tr").evaluate_all(
        "rows => rows.map(row => Number(row.dataset.index))"
    )
    sizes = [c["bytes"] for c in seen.data()["ranks"][0]["graphs"][1]["timeline"]["collectives"]]
    assert [sizes[n] for n in numbers] == sorted(sizes)
    table.get_by_role("button", name="#").click()
    table.get_by_role("button", name="#").click()
    assert table.locator("tbody tr td").first.text_content() == str(len(sizes) - 1)


def test_memory(seen: Seen) -> None:
    """The peak is marked and owned; a click elsewhere says what is alive there."""
    page = seen.page
    seen.tab("Memory")
    graphs = seen.data()["ranks"][0]["graphs"]
    best = max(graphs, key=lambda g: g["memory"]["plain"]["peak"])
    profile = best["memory"]["plain"]
    mark = page.locator(".peak-mark").text_content()
    assert f"%{best['memory']['nodes'][profile['where']]}" in mark
    assert page.locator("path.area").count() == page.locator(".legend .dot").count() >= 4
    assert page.get_by_text("At the peak: ").is_visible()
    alive = sum(curve[profile["where"]] > 0 for curve in profile["kinds"].values())
    assert page.locator(".owners-table tbody tr").count() == alive
    drawing = page.locator("svg.memory")
    drawing.hover(position={"x": 300, "y": 200})
    assert re.search(r"\d (MB|kB|B) at %", page.locator("#tip").text_content())
    drawing.click(position={"x": 300, "y": 200})
    assert page.get_by_text("At the chosen node: ").is_visible()
    by_node = page.locator("path.area").first.get_attribute("d")
    page.locator(".bar-of-tools select").select_option("time")
    assert page.locator("path.area").first.get_attribute("d") != by_node
    assert "predicted time, ms" in drawing.text_content()


def test_passes_open(seen: Seen) -> None:
    page = seen.page
    seen.tab("Passes")
    lower = page.locator("details", has_text="01_lower").first
    lower.locator("summary").click()
    lower.locator(".added").first.wait_for(state="visible")
    assert lower.get_by_text("made by lower; holds: ").is_visible()


def test_switches(seen: Seen) -> None:
    """Another rank, the other executor, and a tab that survives a reload."""
    page = seen.page
    assert "rank 0 of 2" in page.locator("#subtitle").text_content()
    page.get_by_label("rank", exact=True).select_option("1")
    assert "rank 1 of 2" in page.locator("#subtitle").text_content()
    predicted = page.locator(".tile", has_text="predicted forward and backward").locator("b")
    before = predicted.text_content()
    page.get_by_label("predicted for").select_option("fused")
    assert predicted.text_content() != before
    seen.tab("Settings")
    page.reload()
    assert page.get_by_role("tab", name="Settings").get_attribute("aria-selected") == "true"
    assert page.get_by_text("bucket_bytes").is_visible()
    for words in ("all-to-alls", "starting delays the thread by", "each further message"):
        assert page.get_by_text(f"every link: {words}").is_visible()
    with page.expect_download() as download:
        page.get_by_text("save trace.json").click()
    assert json.loads(download.value.path().read_text())["traceEvents"]


def test_several_graphs(browser: Any, dump: Path, tmp_path: Path) -> None:
    """Two steps of one rank and a forward alone, unmeasured: the last whole one is shown first, the
    others by a switch.
    """
    first = sorted((dump / "rank0").glob("*_*ward"))
    for number, source in enumerate((*first, *first, first[0])):
        name = f"{number:03d}_{source.name.split('_')[1]}"
        shutil.copytree(source, tmp_path / "dump" / "rank0" / name)
        memory = tmp_path / "dump" / "rank0" / name / "memory.json.gz"
        memory.write_text(
            gzip.decompress(memory.read_bytes())
            .decode()
            .replace(f'"after": "{first[0].name}"', f'"after": "{number - 1:03d}_forward"')
        )
    write_report(tmp_path / "dump", tmp_path / "page.html")
    seen = Seen(browser, tmp_path / "page.html")
    choices = seen.page.get_by_label("graphs")
    assert choices.locator("option").all_text_contents() == [
        "000_forward + 001_backward",
        "002_forward + 003_backward",
        "004_forward",
    ]
    assert choices.input_value() == "1"
    assert seen.page.locator("svg.timeline").count() == 2
    choices.select_option("2")
    assert seen.page.locator("svg.timeline").count() == 1
    assert seen.page.locator(".source-measured").count() == 0
    seen.tab("Memory")
    assert seen.page.locator("path.area").count() > 1
    seen.context.close()
    assert seen.wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(browser: Any, file: Path, scheme: str) -> None:
    """Contrast of at least 4.5 between ink and page, and between a bar and its label, in both
    schemes.
    """
    seen = Seen(browser, file, scheme)
    names = [
        "--page",
        "--panel",
        "--ink",
        "--muted",
        *(f"--{k}{i}" for k in ("gather", "reduce", "other") for i in ("", "-ink")),
    ]
    read = "(name) => getComputedStyle(document.documentElement).getPropertyValue(name)"
    colors = {name: seen.page.evaluate(read, name) for name in names}
    seen.context.close()
    pairs = [("--ink", "--page"), ("--muted", "--panel"), ("--ink", "--panel")]
    pairs += [(f"--{kind}-ink", f"--{kind}") for kind in ("gather", "reduce", "other")]
    low = {pair: contrast(colors[pair[0]], colors[pair[1]]) for pair in pairs}
    assert min(low.values()) >= 4.5, low
    assert seen.wrong == []


def contrast(one: str, other: str) -> float:
    """The ratio of luminances that WCAG defines."""
    levels = []
    for color in (one, other):
        parts = [int(color.strip()[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        levels.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(levels) + 0.05) / (min(levels) + 0.05)


def test_a_narrow_window_scrolls_no_page(browser: Any, file: Path) -> None:
    seen = Seen(browser, file)
    seen.page.set_viewport_size({"width": 640, "height": 800})
    for name in ("Timeline", "Memory", "Buckets", "Passes", "Settings"):
        seen.tab(name)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 640, name
    seen.context.close()


def widened(dump: Path, folder: Path, times: int = 6) -> Path:
    """A dump whose graphs have each collective so many times, as with many layers; unmeasured."""
    found = folder / "dump"
    shutil.copytree(dump, found)
    for path in found.glob("rank*/measured.json"):
        path.unlink()
    for path in found.glob("rank*/*/timeline.json.gz"):
        values = load(path, "testing")
        values["collectives"] *= times
        for number, collective in enumerate(values["collectives"]):
            collective["units"] = [f"model.layers.{number}"]
        values["waits"] = list(range(len(values["collectives"])))
        for executor in ("plain", "fused"):
            values[executor]["times"] *= times
        path.write_text(json.dumps(values))
    return found


@pytest.mark.parametrize("width", [500, 1280, 2560])
def test_many_layers(browser: Any, dump: Path, tmp_path: Path, width: int) -> None:
    """The most exposed first and the others folded, labels without what all begin with, passes that
    did nothing hidden, and no page that scrolls sideways.
    """
    write_report(widened(dump, tmp_path), tmp_path / "page.html")
    seen = Seen(browser, tmp_path / "page.html")
    page = seen.page
    page.set_viewport_size({"width": width, "height": 900})
    graph = seen.data()["ranks"][0]["graphs"][0]
    exposed = sorted((t["exposed"] for t in graph["timeline"]["plain"]["times"]), reverse=True)
    rows = page.locator("table.collectives").first.locator("tbody tr")
    assert rows.count() == 5
    numbers = rows.evaluate_all("rows => rows.map(row => Number(row.dataset.index))")
    times = graph["timeline"]["plain"]["times"]
    assert [times[n]["exposed"] for n in numbers] == exposed[:5]
    page.get_by_role("button", name=f"all {len(times)}, in order").first.click()
    assert rows.count() == len(times)
    labels = page.locator("svg.timeline").first.locator(".wire-lane text").all_text_contents()
    assert not any(label.startswith("model") for label in labels)
    unit = rows.first.locator("td").nth(2)
    assert unit.bounding_box()["width"] > 100, "names are broken at every letter"
    for name in ("Timeline", "Memory", "Buckets", "Passes", "Settings"):
        seen.tab(name)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        if name == "Memory":
            drawing, peak = page.locator("svg.memory"), page.locator(".peak-mark text")
            assert peak.bounding_box()["x"] > drawing.bounding_box()["x"]
    seen.tab("Passes")
    idle = page.get_by_text("passes that changed no collective, cast or free").last
    verify = page.get_by_text(re.compile(r"^\d+_verify$"))
    assert verify.count() == 0
    idle.click()
    verify.wait_for(state="visible")
    seen.context.close()
    assert seen.wrong == []
