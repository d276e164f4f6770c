"use strict";
// The flame graph: an icicle of SVG, callers above. Only what is wider than a pixel is drawn, so that
// thousands of stacks are drawn at once and again at each step.

const SVG = "http://www.w3.org/2000/svg";

function make(parent, tag, attributes) {
  const element = parent.appendChild(document.createElementNS(SVG, tag));
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const CHARACTER_PX = 6.65;

function percent(part, whole) {
  if (!(whole > 0)) return "-";
  const share = 100 * part / whole;
  return share > 0 && share < 0.01 ? "under 0.01 %" : share.toFixed(share < 10 ? 2 : 1) + " %";
}

const BYTES = [[2 ** 30, 2, " GiB"], [2 ** 20, 1, " MiB"], [2 ** 10, 0, " KiB"], [1, 0, " B"]];

function amount(kind, value) {
  const unit = data.units[kind];
  if (unit === "bytes") {
    const [size, digits, name] = BYTES.find(([size]) => value >= size) || BYTES[3];
    return (value / size).toFixed(digits) + name;
  }
  if (unit !== "s") {
    return value.toLocaleString("en-US", {maximumFractionDigits: value < 10 ? 1 : 0});
  }
  if (value >= 1) return value.toFixed(3) + " s";
  return value >= 1e-3 ? (value * 1e3).toFixed(2) + " ms" : (value * 1e6).toFixed(0) + " \u00b5s";
}

function counted(kind, value) {
  return amount(kind, value) + (data.units[kind] === "count" ? " " : " of ") + data.nouns[kind];
}

// A C++ name loses its outer qualifiers before it loses its end.
function fitting(label, fits) {
  const parts = label.split("::");
  while (parts.length > 1 && parts.join("::").length > fits) parts.shift();
  return parts.join("::");
}

function sprout(frame, parent) {
  const depth = parent ? parent.depth + 1 : 0;
  return {frame, parent, depth, weight: 0, own: 0, samples: 0, sources: new Set(), kids: new Map()};
}

// All stacks of a kind and cause ("": any), as nodes with their weight, from the outermost or the innermost
// function on. The root has no frame.
function grow(kind, cause, inverted) {
  const root = sprout(null, null);
  root.deepest = 0;
  for (const stack of data.stacks) {
    if (stack.kind !== kind || (cause && stack.cause !== cause)) continue;
    const path = stack.frames.map(index => data.frames[index]);
    let at = root;
    for (const frame of [null, ...(inverted ? path.reverse() : path)]) {
      if (frame) {
        if (!at.kids.has(frame.number)) at.kids.set(frame.number, sprout(frame, at));
        at = at.kids.get(frame.number);
        if (frame.source) at.sources.add(frame.source);
      }
      at.weight += stack.weight;
      at.samples += stack.samples;
    }
    at.own += stack.weight;
    root.deepest = Math.max(root.deepest, path.length);
  }
  const waiting = [root];
  while (waiting.length) {
    const node = waiting.pop();
    node.kids = [...node.kids.values()]
      .sort((a, b) => b.weight - a.weight || a.frame.number - b.frame.number);
    waiting.push(...node.kids);
  }
  return root;
}

class Flame {
  constructor(box, tip, changed) {
    this.box = box;
    this.tip = tip;
    this.changed = changed;
    this.query = "";
    this.svg = make(box, "svg", {role: "tree", tabindex: -1});
    this.svg.addEventListener("click", event => this.zoom(this.under(event)));
    this.svg.addEventListener("mousemove", event => {
      this.tell(this.under(event), event.clientX, event.clientY);
    });
    this.svg.addEventListener("mouseleave", () => this.hush());
    this.svg.addEventListener("focusin", event => this.focused(event.target));
    this.svg.addEventListener("focusout", () => this.hush());
    this.svg.addEventListener("keydown", event => this.key(event));
    box.addEventListener("scroll", () => this.hush());
    addEventListener("scroll", () => this.hush(), {passive: true});
    this.width = 0;
    new ResizeObserver(() => {
      if (this.box.clientWidth !== this.width) this.draw();
    }).observe(box);
  }

  show(kind, cause, inverted) {
    this.kind = kind;
    this.cause = cause;
    this.root = this.top = this.current = grow(kind, cause, inverted);
    this.box.scrollTop = 0;
    this.draw();
  }

  zoom(node) {
    if (!node || node === this.top) return;
    const kept = document.activeElement && this.svg.contains(document.activeElement);
    this.top = this.current = node;
    this.hush();
    this.draw();
    if (kept) this.focus(node);
  }

  search(query) {
    this.query = query.trim().toLowerCase();
    this.draw();
  }

  name(node) {
    return node.frame ? node.frame.function : "all " + data.nouns[this.kind];
  }

  matches(node) {
    return Boolean(node.frame) && [node.frame.function, node.frame.module, ...node.sources]
      .some(text => text.toLowerCase().includes(this.query));
  }

  // What has a match anywhere on its stack, each stack once.
  matched(from) {
    let sum = 0;
    for (const waiting = [from]; waiting.length;) {
      const node = waiting.pop();
      if (this.matches(node)) sum += node.weight;
      else waiting.push(...node.kids);
    }
    return sum;
  }

  draw(width = this.box.clientWidth) {
    if (!this.root || !width) return;
    this.width = width;
    this.drawn = new Map();
    const rows = document.createDocumentFragment();
    const above = [];
    for (let node = this.top.parent; node; node = node.parent) above.unshift(node);
    for (const node of above) this.put(rows, node, 0, width, true);
    const waiting = [[this.top, 0]];
    while (waiting.length) {
      const [node, left] = waiting.pop();
      this.put(rows, node, left, width * node.weight / this.top.weight, false);
      let at = left;
      const wide = [];
      for (const kid of node.kids) {
        const extent = width * kid.weight / this.top.weight;
        if (extent < 1) break;
        wide.push([kid, at]);
        at += extent;
      }
      waiting.push(...wide.reverse());
    }
    this.svg.replaceChildren(rows);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", data.row * (this.root.deepest + 1));
    this.svg.setAttribute("aria-label", "Flame graph of " + data.nouns[this.kind]);
    (this.drawn.get(this.current) || this.drawn.get(this.top)).setAttribute("tabindex", "0");
    this.changed(this);
  }

  put(rows, node, left, extent, above) {
    const {kernel, inlined, label: short} = node.frame || {};
    const kind = !node.frame ? "root" : kernel ? "kernel" : "user";
    const hit = this.query && this.matches(node);
    const group = make(rows, "g", {
      class: kind + (inlined ? " inlined" : "") + (node.depth % 2 ? " odd" : "") + (above ? " above" : "")
        + (hit ? " hit" : this.query ? " miss" : ""),
      role: "treeitem", tabindex: -1, "aria-level": node.depth + 1,
      "aria-label": this.name(node) + ", " + counted(this.kind, node.weight) + ", "
        + percent(node.weight, this.root.weight) + (kernel ? ", kernel" : "") + (inlined ? ", inlined" : ""),
    });
    const top = node.depth * data.row;
    const width = Math.max(0.5, extent).toFixed(2);
    make(group, "rect", {x: left.toFixed(2), y: top, width, height: data.row});
    const fits = Math.floor((extent - 8) / CHARACTER_PX);
    if (fits >= 3) {
      const label = fitting(short || this.name(node), fits);
      make(group, "text", {x: (left + 4).toFixed(2), y: top + data.row - 5.5}).textContent =
        label.length > fits ? label.slice(0, fits - 1) + "\u2026" : label;
    }
    group.node = node;
    this.drawn.set(node, group);
  }

  under(event) {
    const group = event.target.closest("g");
    return group && group.node;
  }

  tell(node, x, y) {
    if (!node) return this.hush();
    const line = (text, quiet, tag = "span") =>
      Object.assign(document.createElement(tag), {textContent: text, className: quiet ? "quiet" : ""});
    const lines = [line(this.name(node), false, "b")];
    if (node.frame) {
      const [first, ...others] = [...node.sources].sort();
      const source = others.length ? first + " and " + others.length + " more" : first;
      const {module, inlined} = node.frame;
      const where = [module, inlined ? "inlined" : "", source].filter(Boolean).join(", ");
      if (where) lines.push(line(where, true));
    }
    lines.push(line(counted(this.kind, node.weight) + ": " + percent(node.weight, this.root.weight)
      + (this.top.frame && this.top.depth <= node.depth
        ? " of all, " + percent(node.weight, this.top.weight) + " of what is zoomed" : " of all")));
    if (node.own > 0 && node.own < node.weight) {
      lines.push(line("ends here: " + counted(this.kind, node.own)));
    }
    const samples = node.samples.toLocaleString("en-US");
    if (node.samples) lines.push(line(samples + (node.samples === 1 ? " sample" : " samples"), true));
    this.tip.replaceChildren(...lines);
    this.tip.hidden = false;
    const {offsetWidth, offsetHeight} = this.tip;
    const edge = document.documentElement.clientWidth;
    this.tip.style.left = Math.max(8, Math.min(x + 14, edge - offsetWidth - 8)) + "px";
    const below = y + 18;
    const fits = below + offsetHeight <= innerHeight - 8;
    this.tip.style.top = (fits ? below : Math.max(8, y - offsetHeight - 12)) + "px";
  }

  hush() {
    this.tip.hidden = true;
  }

  focused(group) {
    if (!group.node) return;
    const before = this.drawn.get(this.current);
    if (before) before.setAttribute("tabindex", "-1");
    group.setAttribute("tabindex", "0");
    this.current = group.node;
    if (!group.matches(":focus-visible")) return;
    const place = group.firstChild.getBoundingClientRect();
    this.tell(group.node, Math.max(0, place.left), place.bottom - 10);
  }

  focus(node) {
    const group = this.drawn.get(node);
    if (group) group.focus();
  }

  key(event) {
    const node = this.current;
    // Kids without a box are too narrow; those of a caller above what is zoomed are all but one out of sight.
    const kids = node.kids.filter(kid => this.drawn.has(kid));
    const beside = node.parent ? node.parent.kids.filter(kid => this.drawn.has(kid)) : [node];
    const step = {
      ArrowDown: () => kids[0], ArrowUp: () => node.parent,
      ArrowRight: () => beside[beside.indexOf(node) + 1], ArrowLeft: () => beside[beside.indexOf(node) - 1],
      Home: () => this.root,
    }[event.key];
    if (step) this.focus(step());
    else if (event.key === "Enter" || event.key === " ") this.zoom(node);
    else if (event.key === "Escape") this.zoom(this.root);
    else return;
    event.preventDefault();
  }
}
