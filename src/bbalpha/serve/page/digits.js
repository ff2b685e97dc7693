// A model of digits: a drawing made small, the votes of the passes, and an attack.
import { $, ask, headline, newest, percent, number } from "./common.js";
import { cells, colour, votes } from "./draw.js";
import { entropies } from "./table.js";

const SIDE = 8, FINE = 32, BLOCK = FINE / SIDE;
// held-out digits of scikit-learn, by rows, 0 to g for 0 to 16 of 16
const EXAMPLES = [
  "002af70000ef7f2004g30b4004e0078007c0067004g10c4001ecag10001ed500",
  "002ga000004gg500008gg300009gg300008gg300008gg100005ge000001cg300",
  "04gg30000bebb0000b72g1000003g000000ac000003g853000cgggg003gf8740",
  "009ggf4008g97eb00551df10000ag7000001bg4000000e8000346g4000egg800",
  "0007c000003e600000b8001004g31aa008gced3002cag5000006g0000006d000",
  "00688d3001eec93004g8200004gdf70000003f0000003f000068d800009f8000",
  "000a8000006e300000b8000003g8200006gggf3000g208c000bc5bc00018gf20",
  "00dgf20005e5f7000020c7000059g700008ggga0002g3000008d000000f70000",
  "004fea100079098000b92d70004fe400006ff10004e1d70007d15d00007egg10",
  "002ed80000cdcd0000b66g40005gfg8000024b8000000b9002d71ba0002afg20",
];
let model = null, strokes = [], image = blank(), cursor = [3, 3], drawing = null, n_scribbles = 0;

export function showDigits(chosen) {
  model = chosen;
  $("input-title").textContent = "A drawing";
  $("scores").textContent = scores();
  use(read(EXAMPLES[5]));
}

function blank() {
  return Array.from({ length: SIDE }, () => Array(SIDE).fill(0));
}

function read(text) {
  return blank().map((row, r) => row.map((_, c) => parseInt(text[SIDE * r + c], 17) / 16));
}

// ------------------------------------------------------------------------------ from strokes to cells

/** Strokes moved to the middle, as tall as the digits that were learned from, as ink of 32 x 32 in blocks of 4 x 4. */
export function small(lines) {
  const points = lines.flat();
  if (!points.length) return blank();
  const box = (axis) => [Math.min(...points.map((p) => p[axis])), Math.max(...points.map((p) => p[axis]))];
  const [[left, right], [top, bottom]] = [box(0), box(1)];
  const scale = Math.min(27 / Math.max(bottom - top, 1), 21 / Math.max(right - left, 1), 0.4); // 0.4: a dot stays one
  const moved = lines.map((line) => line.map(([x, y]) => [
    FINE / 2 + (x - (left + right) / 2) * scale, FINE / 2 + (y - (top + bottom) / 2) * scale]));
  const ink = blank();
  for (let y = 0; y < FINE; y++) for (let x = 0; x < FINE; x++) {
    const near = Math.min(...moved.map((line) => away(line, x + 0.5, y + 0.5)));
    ink[Math.floor(y / BLOCK)][Math.floor(x / BLOCK)] += Math.min(1, Math.max(0, 2.9 - near));
  }
  return ink.map((row) => row.map((v) => Math.round(v) / BLOCK ** 2));
}

/** How far a point is from a line of points. */
function away(line, x, y) {
  let least = Infinity;
  for (let i = 0; i < line.length; i++) {
    const [[ax, ay], [bx, by]] = [line[Math.max(0, i - 1)], line[i]];
    const [dx, dy] = [bx - ax, by - ay], length = dx * dx + dy * dy;
    const t = length ? Math.min(1, Math.max(0, ((x - ax) * dx + (y - ay) * dy) / length)) : 0;
    least = Math.min(least, Math.hypot(x - ax - t * dx, y - ay - t * dy));
  }
  return least;
}

/** A line that wanders about: the same ones in the same order, however often the page is opened. */
function wander(seed) {
  let state = 2654435761 * (seed + 1) >>> 0;
  const random = () => ((state = (1664525 * state + 1013904223) >>> 0) / 2 ** 32);
  const line = [[144, 144]];
  let heading = 2 * Math.PI * random();
  for (let i = 0; i < 26; i++) {
    heading += 2.4 * (random() - 0.5);
    const [x, y] = line.at(-1), next = [x + 34 * Math.cos(heading), y + 34 * Math.sin(heading)];
    if (next.some((v) => v < 20 || v > 268)) heading += Math.PI / 2;
    else line.push(next);
  }
  return line;
}

// ------------------------------------------------------------------------------ the drawing

function paint() {
  const canvas = $("canvas"), pen = canvas.getContext("2d"), size = canvas.width / SIDE;
  if (strokes.length) {
    pen.fillStyle = colour("card");
    pen.fillRect(0, 0, canvas.width, canvas.height);
  } else cells(canvas, image);
  pen.strokeStyle = colour("line");
  pen.lineWidth = 1;
  pen.beginPath();
  for (let i = 1; i < SIDE; i++) {
    pen.moveTo(i * size, 0); pen.lineTo(i * size, canvas.height);
    pen.moveTo(0, i * size); pen.lineTo(canvas.width, i * size);
  }
  pen.stroke();
  pen.strokeStyle = colour("ink");
  pen.lineWidth = 22;
  pen.lineCap = pen.lineJoin = "round";
  for (const line of strokes) {
    pen.beginPath();
    line.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
    if (line.length === 1) pen.lineTo(line[0][0] + 0.1, line[0][1]);
    pen.stroke();
  }
  if (canvas.matches(":focus-visible")) {
    pen.strokeStyle = colour("epistemic");
    pen.lineWidth = 4;
    pen.strokeRect(cursor[1] * size + 2, cursor[0] * size + 2, size - 4, size - 4);
  }
}

/** Show and send these cells; strokes are kept where they are what the cells came from. */
function use(pixels, lines = []) {
  strokes = lines;
  image = pixels;
  paint();
  cells($("seen"), image);
  changed();
}

function at(event) {
  const box = $("canvas").getBoundingClientRect(), unit = $("canvas").width / box.width;
  return [(event.clientX - box.left) * unit, (event.clientY - box.top) * unit];
}

$("canvas").addEventListener("pointerdown", (event) => {
  if (event.button) return;
  $("canvas").setPointerCapture(event.pointerId);
  drawing = [at(event)];
  use(small([...strokes, drawing]), [...strokes, drawing]);
});
$("canvas").addEventListener("pointermove", (event) => {
  if (!drawing) return;
  const [x, y] = at(event), [a, b] = drawing.at(-1);
  if (Math.hypot(x - a, y - b) < 3) return;
  drawing.push([x, y]);
  use(small(strokes), strokes);
});
for (const end of ["pointerup", "pointercancel"]) $("canvas").addEventListener(end, () => { drawing = null; });
for (const turn of ["focus", "blur"]) $("canvas").addEventListener(turn, paint);

const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
$("canvas").addEventListener("keydown", (event) => {
  const move = MOVES[event.key];
  if (!move && event.key !== " ") return;
  event.preventDefault();
  if (move) {
    cursor = cursor.map((v, i) => Math.min(SIDE - 1, Math.max(0, v + move[i])));
    paint();
  } else {
    const [r, c] = cursor;
    use(image.map((row, i) => row.map((v, j) => (i === r && j === c ? Number(v < 0.5) : v))));
  }
  const filled = image[cursor[0]][cursor[1]] >= 0.5 ? "filled" : "empty";
  $("pen").textContent = `Row ${cursor[0] + 1}, column ${cursor[1] + 1}, ${filled}`;
});

function fresh(pixels, lines) {
  $("attack").value = 0;
  use(pixels, lines);
}

$("clear").addEventListener("click", () => fresh(blank()));
$("scribble").addEventListener("click", () => {
  const line = wander(n_scribbles++);
  fresh(small([line]), [line]);
});
$("examples").append(...EXAMPLES.map((text, digit) => {
  const button = document.createElement("button");
  Object.assign(button, { type: "button", id: `example-${digit}`, textContent: digit });
  button.setAttribute("aria-label", `Example ${digit}`);
  button.addEventListener("click", () => fresh(read(text)));
  return button;
}));
$("attack").addEventListener("input", () => changed());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => model && use(image, strokes));

// ------------------------------------------------------------------------------ the answer

function changed() {
  $("attack-step").textContent = Number($("attack").value).toFixed(2);
  askDigit(model, image, Number($("attack").value));
}

const askDigit = newest(async (asked, pixels, step, stale) => {
  const given = step ? (await ask("attack", { model: asked.name, image: pixels, step })).image : pixels;
  if (stale()) return;
  const answer = await ask("predict", { model: asked.name, image: given, seed: asked.seed ?? undefined });
  if (stale() || asked !== model || $("drawing").hidden) return;
  const p = answer.predictions[0], empty = pixels.flat().every((v) => v === 0);
  cells($("attacked"), given);
  $("attacked-words").textContent = step ? `What the model is given: cells moved by up to ${number(step)}.` : "What the model is given: the same.";
  headline(empty ? "Nothing is drawn" : `It looks like a ${p.label}`,
    `${empty ? `Asked all the same, it says ${p.label}, w` : "W"}ith probability ${percent(p.probs[p.label])}.`, answer.n_passes, answer.seed);
  entropies(p, asked, "drawing");
  $("picture-title").textContent = "How the passes vote";
  const each = votes($("picture"), p.votes, p.label);
  $("picture-words").textContent = `One dot is ${each === 1 ? "one pass" : `${each} passes`} of ${answer.n_passes}, over the digit ` +
    "that it would say: blue for the answer, orange for the others. Where dots are scattered, the passes disagree.";
}, 30);

function scores() {
  const s = model.scores || {};
  if (s.accuracy === undefined) return "No held-out scores came with this model: nothing here says how good it is.";
  const flagged = ["clean", "attacked", "scribbled"].map((name) => s[`unusual_${name}`]);
  return `It was right in ${percent(s.accuracy)} of the digits that it never saw.` +
    (flagged.includes(undefined) ? "" : ` It called ${percent(flagged[0])} of them unusual, ${percent(flagged[1])} of them after an ` +
      `attack of 0.2, and ${percent(flagged[2])} of scribbles: the badge is a help, no guard.`);
}
