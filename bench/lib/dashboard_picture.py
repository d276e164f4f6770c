"""A picture of the dashboard of `calm export`, with the figures of programs that run meanwhile.

`calm export` and Prometheus observe programs with peaks and pauses. Then plotly draws the panels of the
dashboard at their places, each from the results of its own queries, and a browser renders the page. Grafana
is not needed.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
from selenium import webdriver

from lib.prometheus import DASHBOARD, ROOT, Prometheus, Series, exporter, substituted

# Library, seconds from the start, and command.
PROGRAMS = [
    (
        "libcalmalloc.so",
        0,
        "sawtooth --threads 2 --bytes 120000000 --max 4096 --hold 1 --rest 3 --rounds 1000",
    ),
    ("libcalmalloc.so", 0, "larson --seconds 600"),
    ("libcalmalloc.so", 10, "idle-burst --bytes 100000000 --seconds 600"),
    ("libcalmalloc.so", 30, "idle-burst --bytes 200000000 --seconds 600"),
]
VARIABLES = {
    "instance": ".*",
    "process": "sawtooth|larson|idle-burst",
    "__rate_interval": "4s",
}
UNITS: dict[str, Sequence[tuple[float, str]]] = {
    "bytes": [(2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " B")],
    "binBps": [(2**30, " GiB/s"), (2**20, " MiB/s"), (2**10, " KiB/s"), (1, " B/s")],
    "percentunit": [(0.01, " %")],
    "cps": [(1e6, " M/s"), (1e3, " k/s"), (1, " /s")],
    "s": [(1, " s"), (1e-3, " ms"), (1e-6, " µs")],
    "short": [(1e6, " M"), (1e3, " k"), (1, "")],
}
"""Grafana's units: what a value is divided by from which magnitude on, and its suffix then."""

COLUMN_PX, CELL_PX, GAP_PX = 54, 27, 8
COLORS = ["#5aa454", "#d9a800", "#3f74d9", "#e07b1a", "#d8394f", "#9351b8", "#5fa8d3", "#7a7f87"]

PAGE = jinja2.Template(
    """<!doctype html><meta charset="utf-8"><script>{{ plotly }}</script><style>
body { margin: 0; background: #f4f5f5; font: 13px sans-serif; color: #24292e }
body > div { position: absolute }
.panel { background: #fff; border: 1px solid #e0e2e4; border-radius: 2px; overflow: hidden }
.row { font-weight: bold; font-size: 15px; line-height: 26px }
.title { font-weight: bold; padding: 5px 8px; white-space: nowrap }
.value { font-size: 30px; text-align: center; padding-top: 8px }
</style>
{% for each in panels %}<div class="{{ each.class }}" style="{{ each.style }}">
<div class="title">{{ each.title }}</div>
{% if each.text %}<div class="value" style="color: {{ each.color }}">{{ each.text }}</div>{% endif %}
{% if each.figure %}<div id="figure{{ loop.index }}"></div><script>
Plotly.newPlot('figure{{ loop.index }}', {{ each.figure.data | tojson }}, {{ each.figure.layout | tojson }},
               {staticPlot: true})
</script>{% endif %}
</div>{% endfor %}"""
)


def scale(panel: dict[str, Any], largest: float) -> tuple[float, str]:
    units = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
    return next((each for each in units if largest >= each[0]), units[-1])


def legend(target: dict[str, Any], series: Series) -> str:
    labels = series["metric"]
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(labels.get(match[1], "")), target["legendFormat"])


def overrides(panel: dict[str, Any], name: str) -> set[str]:
    """The properties that the panel sets for a series."""
    return {
        each["id"]
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"] == {"id": "byName", "options": name}
        for each in override["properties"]
    }


def stat(panel: dict[str, Any], server: Prometheus) -> dict[str, str]:
    """The value of a stat, and its color."""
    [target] = panel["targets"]
    result = server.query(substituted(target["expr"], VARIABLES))
    if not result:
        return {"text": "No data"}
    value = float(result[0]["value"][1])
    divisor, suffix = scale(panel, value)
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    color = [step["color"] for step in steps if step["value"] is None or step["value"] <= value][-1]
    return {"text": f"{value / divisor:.3g}{suffix}", "color": color if color != "text" else "inherit"}


def figure(
    panel: dict[str, Any], server: Prometheus, span: tuple[float, float], width: int, height: int
) -> dict[str, Any]:
    """A graph, as plotly describes it."""
    found = [
        (legend(target, series), series["values"])
        for target in panel["targets"]
        for series in server.query_range(substituted(target["expr"], VARIABLES), *span, 1)
    ]
    values = [float(value) for _, samples in found for _, value in samples if value != "NaN"]
    divisor, suffix = scale(panel, max(values, default=0))
    lines = []
    for number, (name, samples) in enumerate(found):
        look = overrides(panel, name)
        known = {moment: float(value) / divisor for moment, value in samples if value != "NaN"}
        moments = sorted({moment for _, each in found for moment, _ in each})
        line: dict[str, Any] = {"width": 1.4, "color": COLORS[number % len(COLORS)]}
        if "custom.lineStyle" in look:
            line["dash"] = "dash"
        lines.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": [moment - span[0] for moment in moments],
                "y": [known.get(moment) for moment in moments],
                "line": line,
                **({"stackgroup": "all"} if "custom.stacking" in look else {}),
            }
        )
    layout = {
        "width": width,
        "height": height,
        "font": {"size": 11},
        "margin": {"l": 70, "r": 12, "t": 4, "b": 38},
        "legend": {"orientation": "h", "yanchor": "top", "y": -0.14, "x": 0, "traceorder": "normal"},
        "showlegend": True,
        "xaxis": {"range": [0, span[1] - span[0]], "ticksuffix": " s", "gridcolor": "#eee"},
        "yaxis": {"ticksuffix": suffix, "rangemode": "tozero", "gridcolor": "#eee", "nticks": 6},
    }
    return {"data": lines, "layout": layout}


def page(dashboard: dict[str, Any], server: Prometheus, span: tuple[float, float]) -> tuple[str, int]:
    """The page, and its height."""
    shown: list[dict[str, Any]] = []
    bottom = 0
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        left, top = place["x"] * COLUMN_PX + GAP_PX, place["y"] * CELL_PX + GAP_PX
        width, height = place["w"] * COLUMN_PX - GAP_PX, place["h"] * CELL_PX - GAP_PX
        bottom = max(bottom, top + height + GAP_PX)
        each: dict[str, Any] = {
            "class": "row" if panel["type"] == "row" else "panel",
            "style": f"left: {left}px; top: {top}px; width: {width}px; height: {height}px",
            "title": panel["title"],
        }
        if panel["type"] == "stat":
            each |= stat(panel, server)
        elif panel["type"] == "timeseries":
            each["figure"] = figure(panel, server, span, width - 2, height - 28)
        shown.append(each)
    return PAGE.render(panels=shown, plotly=get_plotlyjs()), bottom


def screenshot(html: str, height: int) -> bytes:
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for word in ("--headless=new", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"):
        options.add_argument(word)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(html)
        driver = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
        try:
            width = 24 * COLUMN_PX + GAP_PX
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            driver.get(file.as_uri())
            return driver.get_screenshot_as_png()
        finally:
            driver.quit()


def compact(picture: bytes) -> bytes:
    """The picture in 64 colors, as PNG."""
    output = io.BytesIO()
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(output, "PNG", optimize=True)
    return output.getvalue()


def main() -> int:
    """Runs the programs, and draws their figures."""
    parser = argparse.ArgumentParser(prog="bench/dashboard-picture", description=__doc__)
    parser.add_argument("file", type=Path, help="the picture to write, PNG")
    parser.add_argument("--seconds", type=int, default=60, help="how long to observe (default 60)")
    arguments = parser.parse_args()
    built = ROOT / "build/release"
    with ExitStack() as stack:

        def start(command: Sequence[str], **variables: str) -> None:
            quiet = subprocess.DEVNULL
            process = subprocess.Popen(command, env=os.environ | variables, stdout=quiet, stderr=quiet)
            stack.callback(process.wait)
            stack.callback(process.kill)

        server = stack.enter_context(Prometheus([stack.enter_context(exporter())]))
        begin = time.time()
        for library, delay, command in PROGRAMS:
            time.sleep(max(0, begin + delay - time.time()))
            program, *words = command.split()
            start([str(built / program), *words], LD_PRELOAD=str(built / library))
        time.sleep(max(0, begin + arguments.seconds - time.time()))
        html, height = page(json.loads(DASHBOARD.read_text()), server, (begin, time.time()))
    arguments.file.write_bytes(compact(screenshot(html, height)))
    return 0
