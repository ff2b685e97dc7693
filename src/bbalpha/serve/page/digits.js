// A model of digits: a drawing made small, the votes of the passes, and an attack.
import { $, ask, headline, newest, percent, number } from "./common.js";
import { cells, colour, votes } from "./draw.js";
import { EXAMPLES, SIDE, blank, read, small, wander } from "./strokes.js";
import { entropies } from "./table.js";

let model = null, strokes = [], image = blank(), cursor = [3, 3], drawing = null, n_scribbles = 0;

export function showDigits(chosen) {
  model = chosen;
  $("input-title").textContent = "A drawing";
  $("scores").textContent = scores();
  use(read(EXAMPLES[5]));
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
