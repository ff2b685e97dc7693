// A frozen network run by onnxruntime-web: cells in, probabilities and uncertainty out.
import * as ort from "./ort.wasm.min.mjs";
import { bars, cells, colour } from "./draw.js";
import { EXAMPLES, blank, read, small, wander } from "./strokes.js";

const $ = (id) => document.getElementById(id);
const canvas = $("canvas");
let strokes = [], drawing = null, scribbles = 0, asked = 0;

ort.env.wasm.numThreads = 1; // threads need headers that plain servers of files do not send
const session = ort.InferenceSession.create("./digits.onnx");

/** Rows of 64 numbers in [0, 1] -> for each its probabilities, entropy and mutual information. */
export async function predict(rows) {
  const x = new ort.Tensor("float32", Float32Array.from(rows.flat()), [rows.length, 64]);
  const { probs, entropy, mutual_information } = await (await session).run({ x });
  return rows.map((_, n) => ({
    probs: Array.from(probs.data.slice(10 * n, 10 * n + 10)),
    entropy: entropy.data[n],
    mutual_information: mutual_information.data[n],
  }));
}

async function show(image) {
  const number = ++asked, empty = image.every((row) => row.every((v) => v === 0));
  const [answer] = await predict([image.flat()]);
  if (number !== asked) return; // another drawing has come since
  const label = answer.probs.indexOf(Math.max(...answer.probs));
  $("headline").textContent = empty ? "Nothing is drawn" : `It looks like a ${label}`;
  bars($("bars"), empty ? {} : Object.fromEntries(answer.probs.map((p, i) => [`digit ${i}`, p])), `digit ${label}`);
  $("entropy").textContent = empty ? "–" : answer.entropy.toFixed(3);
  $("information").textContent = empty ? "–" : answer.mutual_information.toFixed(3);
}

function use(lines) {
  strokes = lines;
  const pen = canvas.getContext("2d");
  pen.fillStyle = colour("card");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  [pen.strokeStyle, pen.lineWidth, pen.lineCap, pen.lineJoin] = [colour("ink"), 22, "round", "round"];
  for (const line of strokes) {
    pen.beginPath();
    line.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
    if (line.length === 1) pen.lineTo(line[0][0] + 0.1, line[0][1]);
    pen.stroke();
  }
  show(lines.length ? small(lines) : blank());
}

function at(event) {
  const box = canvas.getBoundingClientRect(), unit = canvas.width / box.width;
  return [(event.clientX - box.left) * unit, (event.clientY - box.top) * unit];
}

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  use([...strokes, (drawing = [at(event)])]);
});
canvas.addEventListener("pointermove", (event) => {
  if (!drawing) return;
  drawing.push(at(event));
  use(strokes);
});
for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (drawing = null));
$("clear").addEventListener("click", () => use([]));
$("scribble").addEventListener("click", () => use([wander(scribbles++)]));
EXAMPLES.forEach((text, digit) => {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: digit });
  button.addEventListener("click", () => {
    strokes = [];
    cells(canvas, read(text));
    show(read(text));
  });
  $("examples").append(button);
});

window.predict = predict;
session.then(
  () => { $("status").textContent = "The network is ready."; },
  (error) => { $("status").textContent = `The network could not be loaded: ${error.message}`; $("status").className = "wrong"; },
);
use([]);
