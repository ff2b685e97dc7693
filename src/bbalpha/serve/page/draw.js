// The pictures: SVG for lines, a canvas for cells. Colours come from the style sheet.
const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") element.textContent = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function sheet(width, height, words, ...children) {
  return make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words }, ...children);
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// ------------------------------------------------------------------------------ gauge

/** A half ring: full is `most`; the filled part is `total`, of it the share `share` is epistemic. */
export function gauge(place, { total, share, most, limit }) {
  const length = 100, arc = "M 24 124 A 96 96 0 0 1 216 124";
  const filled = Math.min(1, total / most) * length, known = filled * share;
  if (!place.firstChild) {
    const ring = (stroke, id) => make("path", { d: arc, pathLength: length, fill: "none", stroke, "stroke-width": 26, class: "moving", id });
    place.append(make("svg", { viewBox: "0 0 240 150", "aria-hidden": "true" },
      ring("var(--line)", "ring"), ring("var(--aleatoric)", "ring-total"), ring("var(--epistemic)", "ring-epistemic"),
      make("path", { id: "ring-limit", stroke: "var(--ink)", "stroke-width": 2.5 }),
      make("text", { id: "ring-share", x: 120, y: 104, "text-anchor": "middle", class: "big" }),
      make("text", { x: 120, y: 122, "text-anchor": "middle", text: "of it epistemic" }),
      make("text", { x: 24, y: 146, "text-anchor": "middle", text: "sure" }),
      make("text", { id: "ring-most", x: 206, y: 146, "text-anchor": "middle", text: "clueless" })));
  }
  const part = (id) => place.querySelector(`#${id}`);
  part("ring-total").setAttribute("stroke-dasharray", `${filled} ${2 * length}`);
  part("ring-epistemic").setAttribute("stroke-dasharray", `${known} ${2 * length}`);
  part("ring-share").textContent = `${Math.round(100 * share)} %`;
  const mark = part("ring-limit");
  mark.setAttribute("visibility", limit ? "visible" : "hidden");
  if (limit) {
    const turn = Math.PI * (1 - Math.min(1, limit / most)), x = Math.cos(turn), y = Math.sin(turn);
    mark.setAttribute("d", `M ${120 + 80 * x} ${124 - 80 * y} L ${120 + 114 * x} ${124 - 114 * y}`);
  }
}

// ------------------------------------------------------------------------------ density

const axis = { low: 0, high: 0, peak: 0 };

/** Forget the axis of the last model. */
export function newAxis() {
  axis.low = axis.high = axis.peak = 0;
}

/** Round steps from `low` to `high`, about `n` of them. */
function ticks(low, high, n) {
  const rough = (high - low) / n, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
  return found;
}

/** The axis stays where it is while it can, so that one sees the curve move. */
function fitAxis(answer) {
  const low = Math.min(answer.x[0], ...answer.means), high = Math.max(answer.x.at(-1), ...answer.means);
  const wide = axis.high - axis.low;
  if (!(wide > 0) || high - low < 0.12 * wide || high - low > 0.98 * wide) {
    const margin = 0.4 * (high - low);
    [axis.low, axis.high] = [low - margin, high + margin];
  } else {
    const move = Math.min(0, low - axis.low) + Math.max(0, high - axis.high);
    axis.low += move;
    axis.high += move;
  }
  const peak = Math.max(...answer.density);
  axis.peak = Math.min(4 * peak, Math.max(1.05 * peak, axis.peak));
}

export function density(place, answer, name, write) {
  fitAxis(answer);
  const width = 420, top = 14, floor = 180, left = 12, right = width - 12;
  const x = (v) => left + ((v - axis.low) / (axis.high - axis.low)) * (right - left);
  const y = (d) => floor - (d / axis.peak) * (floor - top);
  const points = answer.x.map((v, i) => [v, answer.density[i]]);
  const path = (list) => list.map(([v, d]) => `${x(v).toFixed(1)} ${y(d).toFixed(1)}`).join(" L ");
  const area = (list) => (list.length ? `M ${x(list[0][0]).toFixed(1)} ${floor} L ${path(list)} L ${x(list.at(-1)[0]).toFixed(1)} ${floor} Z` : "");
  const inside = points.filter(([v]) => v >= answer.low && v <= answer.high);
  const passes = answer.means.map((m) => make("line", { x1: x(m), x2: x(m), y1: floor + 4, y2: floor + 22, stroke: "var(--epistemic)", "stroke-width": 1.6, opacity: 0.45 }));
  const scale = ticks(axis.low, axis.high, 5).flatMap((v) => [
    make("line", { x1: x(v), x2: x(v), y1: floor + 26, y2: floor + 31, stroke: "var(--soft)" }),
    make("text", { x: Math.min(right - 14, Math.max(left + 14, x(v))), y: floor + 46, "text-anchor": "middle", text: write(v) })]);
  place.replaceChildren(sheet(width, floor + 70, `Density of ${name}, ${write(answer.low)} to ${write(answer.high)} most likely`,
    make("path", { d: area(points), fill: "var(--fill)" }),
    make("path", { d: area(inside), fill: "var(--fill-strong)" }),
    make("path", { id: "curve", d: `M ${path(points)}`, fill: "none", stroke: "var(--aleatoric)", "stroke-width": 2 }),
    make("line", { x1: x(answer.mean), x2: x(answer.mean), y1: top, y2: floor, stroke: "var(--ink)", "stroke-width": 1.5, "stroke-dasharray": "5 4" }),
    make("line", { x1: left, x2: right, y1: floor, y2: floor, stroke: "var(--line)" }),
    make("g", { id: "passes" }, ...passes),
    make("line", { x1: left, x2: right, y1: floor + 26, y2: floor + 26, stroke: "var(--soft)" }), ...scale,
    make("text", { x: width / 2, y: floor + 65, "text-anchor": "middle", text: name })));
}

// ------------------------------------------------------------------------------ classes

/** Bars of probabilities, the likeliest first where there are many. */
export function bars(place, probs, chosen) {
  const rows = Object.entries(probs).sort((a, b) => b[1] - a[1]).slice(0, 12);
  const height = 30 * rows.length + 6;
  const drawn = rows.flatMap(([name, p], i) => [
    make("text", { x: 120, y: 30 * i + 21, "text-anchor": "end", text: name.length > 17 ? `${name.slice(0, 16)}…` : name }),
    make("rect", { x: 130, y: 30 * i + 5, width: 220, height: 22, fill: "none", stroke: "var(--line)" }),
    make("rect", { x: 130, y: 30 * i + 5, width: 220 * p, height: 22, fill: name === chosen ? "var(--aleatoric)" : "var(--fill-strong)", class: "bar" }),
    make("text", { x: 358, y: 30 * i + 21, text: `${(100 * p).toFixed(1)} %` })]);
  place.replaceChildren(sheet(420, height, `Probabilities: ${rows.map(([n, p]) => `${n} ${(100 * p).toFixed(0)} %`).join(", ")}`, ...drawn));
}

/** One dot a pass, stacked over the class that it votes for. */
export function votes(place, counts, chosen) {
  const names = Object.keys(counts), all = Object.values(counts).reduce((a, b) => a + b, 0);
  const each = Math.max(1, Math.ceil(all / 120)); // passes a dot
  const column = 420 / names.length, across = Math.max(2, Math.floor((column - 4) / 9));
  const rows = Math.max(8, Math.ceil(Math.ceil(Math.max(...Object.values(counts)) / each) / across));
  const floor = 9 * rows + 10, drawn = [];
  names.forEach((name, c) => {
    const start = c * column + column / 2;
    const n = Math.ceil(counts[name] / each);
    for (let i = 0; i < n; i++) {
      const cx = start + 9 * ((i % across) - (across - 1) / 2), cy = floor - 6 - 9 * Math.floor(i / across);
      drawn.push(make("circle", { cx, cy, r: 3.6, fill: name === chosen ? "var(--aleatoric)" : "var(--epistemic)", "data-class": name }));
    }
    drawn.push(make("text", { x: start, y: floor + 18, "text-anchor": "middle", class: "class", text: name }));
    if (n) drawn.push(make("text", { x: start, y: floor + 35, "text-anchor": "middle", text: counts[name] }));
  });
  drawn.push(make("line", { x1: 0, x2: 420, y1: floor, y2: floor, stroke: "var(--soft)" }));
  const told = names.filter((n) => counts[n]).map((n) => `${counts[n]} for ${n}`).join(", ");
  place.replaceChildren(sheet(420, floor + 42, `Votes: ${told}`, ...drawn));
  return each;
}

// ------------------------------------------------------------------------------ cells

const parse = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

function ramp(share) {
  const [low, high] = [parse(colour("map-low")), parse(colour("map-high"))];
  return `rgb(${low.map((v, i) => Math.round(v + (high[i] - v) * share)).join(" ")})`;
}

/** A picture of numbers in [0, 1] by rows. */
export function cells(canvas, image) {
  const pen = canvas.getContext("2d"), size = canvas.width / image[0].length;
  const [paper, ink] = [parse(colour("card")), parse(colour("ink"))];
  image.forEach((row, r) => row.forEach((v, c) => {
    pen.fillStyle = `rgb(${paper.map((p, i) => Math.round(p + (ink[i] - p) * v)).join(" ")})`;
    pen.fillRect(c * size, r * size, size, size);
  }));
}

/** The map of ignorance: rows go up; beyond the line, what is more than `threshold`; a ring marks `at` (shares). */
export function map(canvas, legend, ignorance, threshold, at) {
  const pen = canvas.getContext("2d"), { width, height } = canvas;
  const rows = ignorance.length, columns = ignorance[0].length, w = width / columns, h = height / rows;
  const most = Math.max(...ignorance.flat(), threshold ?? 0) || 1; // from 0, so that small differences look small
  const above = (r, c) => (threshold ?? Infinity) < ignorance[r][c];
  pen.clearRect(0, 0, width, height);
  for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
    pen.fillStyle = ramp(ignorance[r][c] / most);
    pen.fillRect(Math.floor(c * w), Math.floor(height - (r + 1) * h), Math.ceil(w), Math.ceil(h));
  }
  pen.strokeStyle = colour("mark");
  pen.lineWidth = 2;
  pen.beginPath();
  for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
    const [x, y] = [c * w, height - r * h];
    if (c && above(r, c) !== above(r, c - 1)) { pen.moveTo(x, y); pen.lineTo(x, y - h); }
    if (r && above(r, c) !== above(r - 1, c)) { pen.moveTo(x, y); pen.lineTo(x + w, y); }
  }
  pen.stroke();
  if (at) {
    const [x, y] = [at[0] * width, height - at[1] * height];
    for (const [line, name] of [[7, "card"], [3.5, "mark"]]) {
      pen.lineWidth = line;
      pen.strokeStyle = colour(name);
      pen.beginPath();
      pen.arc(x, y, 10, 0, 2 * Math.PI);
      pen.stroke();
    }
  }
  const bar = legend.getContext("2d");
  for (let i = 0; i < legend.width; i++) {
    bar.fillStyle = ramp(i / (legend.width - 1));
    bar.fillRect(i, 0, 1, legend.height);
  }
  return most;
}
