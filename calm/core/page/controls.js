"use strict";
// Tables that sort, and the flame graph's controls.

for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  const value = (row, column) => row.cells[column].dataset.value;
  const words = (a, b) => a.localeCompare(b, "en");
  headings.forEach((heading, column) => {
    const button = heading.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const number = heading.classList.contains("number");
      // Numbers are wanted largest first.
      const down = heading.ariaSort ? heading.ariaSort === "ascending" : number;
      headings.forEach(each => each.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].sort((a, b) =>
        (number ? value(a, column) - value(b, column) : words(value(a, column), value(b, column))));
      table.tBodies[0].append(...(down ? rows.reverse() : rows));
    });
  });
}

const data = JSON.parse(document.getElementById("data").textContent);
const by = id => document.getElementById(id);
let flame = null;

if (by("flame")) {
  const chosen = () => document.querySelector("input[name=kind]:checked").value;
  flame = new Flame(by("flame"), by("tip"), graph => {
    by("reset").disabled = graph.top === graph.root;
    const matched = by("matched");
    if (!graph.query) {
      matched.textContent = counted(graph.kind, graph.root.weight) + (graph.root.samples ? " in " +
        graph.root.samples.toLocaleString("en-US") + " samples" : "");
      return;
    }
    const sum = graph.matched(graph.root);
    matched.textContent = "Matched: " + percent(sum, graph.root.weight) + " of all (" +
      counted(graph.kind, sum) + ")" + (graph.top === graph.root ? "" :
      ", " + percent(graph.matched(graph.top), graph.top.weight) + " of what is zoomed");
  });
  // Causes of this kind only.
  const offer = () => {
    const sums = new Map();
    for (const {kind, cause, weight} of data.stacks) {
      if (kind === chosen()) sums.set(cause, (sums.get(cause) || 0) + weight);
    }
    const order = [...sums].sort((a, b) => b[1] - a[1]).map(([cause]) => cause);
    // A call is named by itself, whatever its cause.
    const names = chosen() === "call" ? {} : data.causes;
    const options = order.map(cause => new Option(names[cause] || cause, cause));
    by("cause").replaceChildren(new Option("all", ""), ...options);
  };
  const show = () => flame.show(chosen(), by("cause").value, by("inverted").checked);
  for (const radio of document.querySelectorAll("input[name=kind]")) {
    radio.addEventListener("change", () => {
      for (const table of document.querySelectorAll(".stacks")) {
        table.hidden = table.dataset.kind !== chosen();
      }
      offer();
      show();
    });
  }
  by("cause").addEventListener("change", show);
  by("inverted").addEventListener("change", show);
  by("search").addEventListener("input", event => flame.search(event.target.value));
  by("reset").addEventListener("click", () => flame.zoom(flame.root));
  offer();
  show();
}

// A printed page is light and has its own size: about that of A4 within its margins.
const PAPER_PX = 680;

function fit(paper, width) {
  document.documentElement.classList.toggle("paper", paper);
  if (flame) flame.draw(width);
}

addEventListener("beforeprint", () => fit(true, PAPER_PX));
addEventListener("afterprint", () => fit(false, undefined));
