"use strict";
// The plots, and the page on paper.

let plots = null;

async function plot() {
  const box = by("plots");
  if (typeof DecompressionStream === "undefined") {
    box.textContent = "The plots need a browser of 2023 or later.";
    return;
  }
  plots = new Plots(box, by("series"));
  await unpack(by("plotly"));
  await plots.draw();
  new ResizeObserver(() => plots.draw()).observe(box.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.draw());
}

if (by("plotly")) setTimeout(plot);

function fitPlots(width, panel) {
  if (!plots) return;
  by("plots").style.height = panel * data.panels.length + data.axis + "px";
  plots.draw(width, panel);
}

addEventListener("beforeprint", () => fitPlots(PAPER_PX, 130));
addEventListener("afterprint", () => fitPlots(undefined, data.panel));
