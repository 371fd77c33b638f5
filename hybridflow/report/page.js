"use strict";
// The page of a run. All of its data is embedded; nothing is fetched. Texts of the run are set as text, never as HTML.

const COLORS = 8, SVG = "http://www.w3.org/2000/svg";
const color = (i) => `var(--c${i % COLORS})`;
const $ = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "rect", "text", "circle"].includes(tag);
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") node.textContent = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isInteger(value) && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6) && value !== 0) return value.toExponential(2);
  return String(Math.abs(value) >= 100 ? Math.round(value * 10) / 10 : Number(value.toPrecision(4)));
}

function hover(node, text) {
  node.addEventListener("mousemove", (event) => {
    const tip = $("tip");
    tip.textContent = typeof text === "function" ? text(event) : text;
    tip.style.display = tip.textContent ? "block" : "none";
    tip.style.left = Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 14 + "px";
  });
  node.addEventListener("mouseleave", () => { $("tip").style.display = "none"; });
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw, found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) found.push(Number(t.toPrecision(12)));
  return found;
}

// series: [{name, x, y}]; nulls in y are gaps, unless most are: then what is there is joined (evaluations).
// log: logarithmic y, values at or below 0 are gaps.
function lineChart(title, note, series, { log = false, xLabel = "step" } = {}) {
  const w = 520, h = 230, left = 58, right = 12, top = 12, bottom = 34;
  const usable = (v) => v !== null && v !== undefined && (!log || v > 0);
  const kept = series.filter((s) => s.y.some(usable));
  const box = make("div", { class: "chart" }, make("h3", { text: title }), make("small", { text: note }));
  if (!kept.length) return null;
  const xs = kept.flatMap((s) => s.x), map = log ? Math.log10 : (v) => v;
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  for (const x of xs) { x0 = Math.min(x0, x); x1 = Math.max(x1, x); }
  for (const s of kept) for (const v of s.y) if (usable(v)) { y0 = Math.min(y0, map(v)); y1 = Math.max(y1, map(v)); }
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 1; y1 += Math.abs(y1) * 0.1 || 1; }
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  const px = (x) => left + (x - x0) / (x1 - x0) * (w - left - right);
  const py = (y) => top + (y1 - map(y)) / (y1 - y0) * (h - top - bottom);
  const svg = make("svg", { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": title });
  for (const t of ticks(y0, y1, 4)) {
    const y = top + (y1 - t) / (y1 - y0) * (h - top - bottom);
    svg.append(make("line", { class: "grid", x1: left, x2: w - right, y1: y, y2: y }));
    svg.append(make("text", { x: left - 6, y: y + 4, "text-anchor": "end", text: short(log ? 10 ** t : t) }));
  }
  for (const t of ticks(x0, x1, 6)) svg.append(make("text", { x: px(t), y: h - bottom + 16, "text-anchor": "middle", text: short(t) }));
  svg.append(make("text", { x: (left + w - right) / 2, y: h - 3, "text-anchor": "middle", text: xLabel }));
  const legend = make("div", { class: "legend" });
  kept.forEach((s, i) => {
    let path = "", open = false, points = 0;
    const joined = s.y.filter(usable).length < s.y.length / 2;
    s.y.forEach((v, j) => {
      if (!usable(v)) { open = open && joined; return; }
      path += `${open ? "L" : "M"}${px(s.x[j]).toFixed(1)} ${py(v).toFixed(1)}`;
      open = true; points += 1;
    });
    svg.append(make("path", { d: path, fill: "none", stroke: color(i), "stroke-width": 1.8, "stroke-linejoin": "round" }));
    if (points < 40) s.y.forEach((v, j) => { if (usable(v)) svg.append(make("circle", { cx: px(s.x[j]), cy: py(v), r: 2.5, fill: color(i) })); });
    legend.append(make("span", {}, make("i", { style: `background:${color(i)}` }), s.name));
  });
  hover(svg, (event) => {
    const at = svg.getBoundingClientRect(), x = x0 + ((event.clientX - at.left) / at.width * w - left) / (w - left - right) * (x1 - x0);
    const lines = kept.map((s) => {
      let best = -1;
      s.x.forEach((v, j) => { if (usable(s.y[j]) && (best < 0 || Math.abs(v - x) < Math.abs(s.x[best] - x))) best = j; });
      return `${s.name}: ${short(s.y[best])}  (${xLabel} ${short(s.x[best])})`;
    });
    return lines.join("\n");
  });
  box.append(svg, legend);
  return box;
}

// rows: [{name, parts: [{name, value}]}] as horizontal stacked bars on one scale.
function barChart(title, note, rows, unit) {
  if (!rows.length) return null;
  const names = [...new Set(rows.flatMap((row) => row.parts.map((part) => part.name)))];
  const most = Math.max(...rows.map((row) => row.parts.reduce((sum, part) => sum + part.value, 0))) || 1;
  const box = make("div", { class: "chart" }, make("h3", { text: title }), make("small", { text: note }));
  for (const row of rows) {
    const total = row.parts.reduce((sum, part) => sum + part.value, 0);
    const bar = make("div", { class: "bar", style: `width:${(100 * total / most).toFixed(2)}%` });
    for (const part of row.parts) {
      const piece = make("div", { style: `flex:${part.value} 0 0;background:${color(names.indexOf(part.name))}` });
      hover(piece, `${part.name}: ${short(part.value)} ${unit} (${(100 * part.value / (total || 1)).toFixed(1)} %)`);
      bar.append(piece);
    }
    box.append(make("div", { class: "dim", text: `${row.name}  ${short(total)} ${unit}` }), bar);
  }
  const legend = make("div", { class: "legend" });
  if (names.length > 1) names.forEach((name, i) => legend.append(make("span", {}, make("i", { style: `background:${color(i)}` }), name)));
  box.append(legend);
  return box;
}

function tableOf(head, rows) {
  const numeric = (i) => rows.every((row) => typeof row[i] === "number" || row[i] === null);
  const cell = (tag, value, i) => make(tag, { class: numeric(i) ? "number" : null, text: typeof value === "number" ? short(value) : value ?? "–" });
  return make("table", {}, make("thead", {}, make("tr", {}, ...head.map((name, i) => cell("th", name, i)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((value, i) => cell("td", value, i))))));
}

// events: [[name, process, role, begin ms, length ms, peak GiB or null]] of one step.
function gantt(events) {
  const order = ["driver", ...new Set(events.map((e) => e[1]).filter((p) => p !== "driver").sort())];
  const lanes = order.filter((p) => events.some((e) => e[1] === p));
  const names = [...new Set(events.map((e) => e[0]))];
  const first = Math.min(...events.map((e) => e[3])), last = Math.max(...events.map((e) => e[3] + e[4]));
  const w = 1100, left = 150, row = 26, h = lanes.length * row + 26, scale = (w - left - 8) / (last - first || 1);
  const svg = make("svg", { viewBox: `0 0 ${w} ${h}`, role: "img", "aria-label": "calls over time" });
  for (const t of ticks(0, last - first, 8)) {
    const x = left + t * scale;
    svg.append(make("line", { class: "grid", x1: x, x2: x, y1: 0, y2: h - 22 }), make("text", { x, y: h - 8, "text-anchor": "middle", text: `${short(t)} ms` }));
  }
  lanes.forEach((lane, i) => svg.append(make("text", { x: left - 8, y: i * row + 17, "text-anchor": "end", text: lane })));
  for (const [name, process, , begin, length, peak] of events) {
    const bar = make("rect", { x: left + (begin - first) * scale, y: lanes.indexOf(process) * row + 4, width: Math.max(1, length * scale), height: row - 8, rx: 2, fill: color(names.indexOf(name)) });
    hover(bar, `${name} on ${process}\n${short(length)} ms, from ${short(begin - first)} ms` + (peak === null ? "" : `\npeak memory ${short(peak)} GiB`));
    svg.append(bar);
  }
  const legend = make("div", { class: "legend" });
  names.forEach((name, i) => legend.append(make("span", {}, make("i", { style: `background:${color(i)}` }), name)));
  return make("div", { class: "chart gantt" }, svg, legend);
}

function section(id, title, note, ...children) {
  const kept = children.filter(Boolean);
  if (!kept.length) return;
  $("nav").append(make("a", { href: `#${id}`, text: title }));
  $("main").append(make("h2", { id, text: title }), make("p", { class: "note", text: note }), ...kept);
}

const charts = (...found) => { const kept = found.filter(Boolean); return kept.length ? make("div", { class: "charts" }, ...kept) : null; };
const pick = (data, names) => names.filter((n) => data.series[n]).map((name) => ({ name, x: data.steps, y: data.series[name] }));
const starting = (data, prefix, without = []) => Object.keys(data.series).filter((n) => n.startsWith(prefix) && !without.includes(n));

async function decoded() {
  const bytes = Uint8Array.from(atob($("data").textContent.trim()), (c) => c.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

function setTheme(name) { document.documentElement.dataset.theme = name; }

async function start() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  $("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  const data = await decoded();
  document.title = data.title;
  $("title").textContent = data.title;
  show(data);
  document.body.dataset.ready = "yes";
}

start();
