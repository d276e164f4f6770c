"use strict";
// Curves over time by plotly: panels one above the other on one time axis. Plotly comes packed in the page, and
// is unpacked when the rest can be read already.

async function unpack(element) {
  const packed = Uint8Array.from(atob(element.textContent), character => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  element.remove();
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A curve of rates is a staircase: each value holds for its bin.
function staircase(panel, trace) {
  const edges = trace.y.map((_, bin) => bin * panel.bin);
  edges.push(trace.y.length * panel.bin);
  return {x: edges, y: [...trace.y, trace.y[trace.y.length - 1]]};
}

class Plots {
  constructor(box, legend) {
    this.box = box;
    this.off = new Set();
    this.traces = [];
    data.panels.forEach((panel, row) => {
      for (const trace of panel.traces) {
        const points = panel.stacked ? staircase(panel, trace) : {x: trace.x, y: trace.y};
        this.traces.push({trace, panel, row, points});
      }
    });
    for (const button of legend.querySelectorAll("button")) {
      button.addEventListener("click", () => this.toggle(button));
    }
  }

  toggle(button) {
    const key = button.dataset.group + ":" + button.dataset.name;
    if (!this.off.delete(key)) this.off.add(key);
    button.setAttribute("aria-pressed", String(!this.off.has(key)));
    this.draw();
  }

  draw(width = this.box.clientWidth, panelHeight = data.panel) {
    if (!window.Plotly || !width) return undefined;
    const narrow = width < 600;
    const text = color("--text"), line = color("--line"), quiet = color("--quiet");
    const curves = this.traces.map(({trace, panel, row, points}) => {
      const shade = color("--c" + trace.color);
      // Outlines of bins of a few pixels would hide what they enclose.
      const dense = points.x.length > width / 6;
      // A curve of few moments shows which they are.
      return {
        ...points, type: "scatter", name: trace.name, xaxis: "x", yaxis: "y" + (row ? row + 1 : ""),
        mode: trace.y.length < 20 && !panel.stacked ? "lines+markers" : "lines",
        line: {
          color: shade, width: panel.stacked ? (dense ? 0 : 1) : 2, shape: panel.stacked ? "hv" : "linear",
        },
        visible: !this.off.has(trace.group + ":" + trace.name), hovertemplate: "%{y:,.4~r} " + panel.unit,
        ...(panel.stacked ? {stackgroup: "panel" + row, fillcolor: shade + (dense ? "e0" : "99")} : {}),
      };
    });
    const count = data.panels.length;
    const height = panelHeight * count + data.axis;
    const unit = 1 / count;
    const layout = {
      width, height, autosize: false, showlegend: false, hovermode: "x unified", hoversubplots: "axis",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: "kept",
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      font: {family: getComputedStyle(document.body).fontFamily, size: narrow ? 11 : 12, color: text},
      margin: {l: narrow ? 46 : 62, r: 12, t: 4, b: data.axis},
      hoverlabel: {bgcolor: color("--raised"), bordercolor: quiet, font: {color: text}},
      xaxis: {
        title: {text: "seconds since the start", standoff: 6}, anchor: "y" + (count > 1 ? count : ""),
        range: [0, data.wall], gridcolor: line, zeroline: false, linecolor: quiet, hoverformat: ".4~g",
        ticksuffix: " s", unifiedhovertitle: {text: "%{x} s"}, spikethickness: 1, spikecolor: quiet,
        spikedash: "solid",
      },
      annotations: data.panels.map((panel, row) => ({
        text: panel.title, xref: "paper", yref: "paper", x: 0, y: 1 - row * unit, xanchor: "left",
        yanchor: "top", showarrow: false, font: {size: 13, color: quiet},
      })),
    };
    data.panels.forEach((panel, row) => {
      layout["yaxis" + (row ? row + 1 : "")] = {
        domain: [1 - (row + 1) * unit + 0.035 * unit, 1 - row * unit - 0.14 * unit], fixedrange: true,
        rangemode: "tozero", gridcolor: line, zerolinecolor: quiet, nticks: 5, automargin: false,
        tickformat: panel.unit.endsWith("/ s") ? "~s" : "~g",
      };
    });
    return Plotly.react(this.box, curves, layout, {
      displaylogo: false, displayModeBar: narrow ? false : "hover", doubleClick: "reset",
      // Plotly's own choice has one that sends the data to a server.
      modeBarButtons: [["toImage", "resetScale2d"]],
    });
  }
}
