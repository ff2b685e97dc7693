// A model of a table: a form for one row, the density or the probabilities as it changes, and a map of ignorance.
import { $, ask, headline, newest, number, percent, share, unsure, unusual } from "./common.js";
import { bars, density, map, newAxis } from "./draw.js";

const STRANGE = "(another)"; // a level that no row had
let model = null, row = {}, last = null, inputs = {};

export function showTable(chosen) {
  model = chosen;
  row = {};
  inputs = {};
  last = null;
  newAxis();
  $("input-title").textContent = "A row of the table";
  $("field-list").replaceChildren(...model.fields.map(field));
  $("scores").textContent = scores();
  const numbers = model.fields.filter((f) => ["number", "span"].includes(f.kind));
  $("map-card").hidden = numbers.length < 2;
  if (numbers.length >= 2) {
    const smooth = numbers.filter((f) => !f.whole || f.high - f.low > 12);
    for (const [id, at] of [["across", 0], ["up", 1]]) {
      $(id).replaceChildren(...numbers.map((f) => new Option(f.name)));
      $(id).value = (smooth.length > 1 ? smooth : numbers)[at].name;
    }
  }
  changed();
}

// ------------------------------------------------------------------------------ the form

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** The controls of one field; what they say goes into `row`. */
function field(f, i) {
  const id = `field-${i}`, box = element("fieldset", { className: "field" });
  box.append(element("legend", { className: "unseen", textContent: f.name }));
  const top = element("div", { className: "top" }, element("label", { className: "name", htmlFor: id, textContent: f.name }));
  const made = { number: numeric, span: numeric, flag, date, level }[f.kind](f, id);
  const note = element("p", { className: "note" });
  inputs[f.name] = made;
  row[f.name] = made.value();
  if (made.box) top.append(made.box);
  box.append(top, ...made.parts, note);
  if (made.note) note.append(element("span", { textContent: made.note }));
  if (f.missing > 0) note.append(unknown(f, id, box, made));
  for (const control of made.controls) {
    control.addEventListener("input", () => {
      if (control.validity && !control.validity.valid) return;
      row[f.name] = made.value();
      changed(f.name);
    });
  }
  return box;
}

function unknown(f, id, box, made) {
  const tick = element("input", { type: "checkbox", id: `${id}-unknown` });
  tick.addEventListener("input", () => {
    for (const control of made.controls) control.disabled = tick.checked;
    box.classList.toggle("off", tick.checked);
    row[f.name] = tick.checked ? null : made.value();
    changed(f.name);
  });
  const label = element("label", {}, tick, " unknown");
  tick.setAttribute("aria-label", `${f.name} is unknown`);
  made.known = () => {
    if (tick.checked) tick.click();
  };
  return label;
}

function numeric(f, id) {
  const width = f.high - f.low || 1, low = f.low >= 0 ? Math.max(0, f.low - 0.4 * width) : f.low - 0.4 * width;
  const step = f.whole ? 1 : 10 ** Math.floor(Math.log10(width) - 2);
  const round = (v) => (f.whole ? Math.round(v) : Number((Math.round(v / step) * step).toPrecision(10)));
  const box = element("input", { type: "number", id, step: "any", required: true, value: round(f.centre) });
  const slide = element("input", { type: "range", min: round(low), max: round(f.high + 0.4 * width), step, value: round(f.centre) });
  slide.setAttribute("aria-label", f.name);
  slide.addEventListener("input", () => { box.value = slide.value; });
  box.addEventListener("input", () => { slide.value = box.value; });
  const set = (v) => { box.value = slide.value = round(v); };
  return { box, parts: [slide], controls: [slide, box], value: () => Number(box.value), set, middle: () => set(f.centre),
    note: `mostly ${number(f.low)} to ${number(f.high)}` };
}

function flag(f, id) {
  const select = element("select", { id }, new Option("yes", "true"), new Option("no", "false"));
  const middle = () => { select.value = String(f.centre >= 0.5); };
  middle();
  return { parts: [select], controls: [select], value: () => select.value === "true", middle };
}

function date(f, id) {
  const day = (text) => String(text).slice(0, 10);
  const input = element("input", { type: "date", id, required: true, value: day(f.centre) });
  return { parts: [input], controls: [input], value: () => input.value, middle: () => { input.value = day(f.centre); },
    note: `seen ${day(f.low)} to ${day(f.high)}` };
}

function level(f, id) {
  const select = element("select", { id }, ...f.levels.map((l) => new Option(l)), new Option("another, never seen", STRANGE));
  const middle = () => { select.value = f.centre ?? f.levels[0] ?? STRANGE; };
  middle();
  const note = f.n_levels > f.levels.length ? `${f.levels.length} of ${f.n_levels}` : "";
  return { parts: [select], controls: [select], value: () => select.value, middle, note };
}

$("reset").addEventListener("click", () => {
  for (const f of model.fields) {
    const control = inputs[f.name];
    control.known?.();
    control.middle();
    row[f.name] = control.value();
  }
  changed();
});

// ------------------------------------------------------------------------------ the answer

/** Ask again; the map too, unless only its own point has moved. */
function changed(name) {
  const question = { model: model.name, row: Object.fromEntries(model.fields.map((f) => [f.name, row[f.name]])) };
  (model.task === "regression" ? askDensity : askClasses)(model, question);
  if (name && [$("across").value, $("up").value].includes(name) && last) drawMap();
  else if (!$("map-card").hidden) askMap(model, question);
}

const askDensity = newest(async (asked, question) => {
  const answer = await ask("density", question);
  if (asked !== model) return;
  headline(`${asked.target}: about ${number(answer.mean, 4)}`,
    `With 90 % probability between ${number(answer.low, 4)} and ${number(answer.high, 4)}.`,
    answer.means.length, answer.seed ?? asked.seed);
  const part = share(answer.epistemic_std ** 2, answer.std ** 2), spread = asked.guess.rmse;
  const most = Math.max(spread || 0, 1.02 * answer.std);
  unsure({ epistemic: answer.epistemic_std, aleatoric: answer.aleatoric_std, total: answer.std, share: part, most,
    digits: Math.min(9, Math.max(0, 2 - Math.floor(Math.log10(answer.std)))), names: ["Epistemic, ±", "Aleatoric, ±", "In all, ±"],
    words: `The ring is the likely error, ± ${number(answer.std)} ${asked.target}, ` +
      (spread ? "full where a guess that looks at nothing would be. " : "") +
      "Orange and blue are the shares of its variance." });
  unusual(answer.unusual, answer.epistemic_std, asked.threshold, "row");
  $("picture-title").textContent = "What is likely";
  density($("picture"), answer, asked.target, (v) => number(v));
  $("picture-words").textContent = `The curve says how likely each ${asked.target} is; 90 % lies under the stronger colour, ` +
    `the dashed line is the mean. Each orange tick is the mean of one of ${answer.means.length} passes: the wider they are ` +
    "scattered, the less the model knows. The width that is left is chance.";
}, 30);

const askClasses = newest(async (asked, question) => {
  const answer = await ask("predict", { model: question.model, rows: [question.row] });
  if (asked !== model) return;
  const p = answer.predictions[0];
  headline(`${asked.target}: ${p.label}`, `With probability ${percent(p.probs[p.label])}.`, answer.n_passes, answer.seed);
  entropies(p, asked, "row");
  $("picture-title").textContent = "How likely each class is";
  bars($("picture"), p.probs, p.label);
  $("picture-words").textContent = `The mean of ${answer.n_passes} passes. A long bar is a sure answer only where the ` +
    "badge above says that the row is usual.";
}, 30);

/** The gauge of classes: entropy, of which the mutual information is epistemic. */
export function entropies(p, asked, what) {
  const most = Math.log(asked.classes.length);
  unsure({ epistemic: p.mutual_information, aleatoric: Math.max(0, p.entropy - p.mutual_information), total: p.entropy,
    share: share(p.mutual_information, p.entropy), most, limit: asked.threshold, digits: 3,
    names: ["Epistemic (mutual information)", "Aleatoric", "In all (entropy)"],
    words: `The ring is the entropy of the answer, in nats: empty is sure, full (${number(most)}) is a blind guess among ` +
      `${asked.classes.length}.` + (asked.threshold ? " Orange beyond the mark is unusual." : "") });
  unusual(p.unusual, p.mutual_information, asked.threshold, what);
}

// ------------------------------------------------------------------------------ the map

const askMap = newest(async (asked, question) => {
  const [across, up] = [$("across").value, $("up").value];
  if (across === up) throw new Error("Choose two different fields for the map.");
  const answer = await ask("map", { ...question, across, up });
  if (asked !== model || across !== $("across").value || up !== $("up").value) return;
  last = { ...answer, names: [across, up] };
  drawMap();
}, 250);

function place(values, value) {
  const step = (values.at(-1) - values[0]) / (values.length - 1);
  return (value - values[0] + step / 2) / (step * values.length);
}

function drawMap() {
  const [across, up] = last.names, at = [row[across], row[up]];
  const shown = at.includes(null) ? null : [place(last.across, at[0]), place(last.up, at[1])];
  const inside = shown && shown.every((s) => s >= 0 && s <= 1);
  const most = map($("map"), $("legend"), last.ignorance, model.threshold, inside ? shown : null);
  const ends = { "across-low": last.across[0], "across-high": last.across.at(-1), "up-low": last.up[0], "up-high": last.up.at(-1),
    "map-least": 0, "map-most": most };
  for (const [id, value] of Object.entries(ends)) $(id).textContent = number(value);
  $("up-name").textContent = `↑ ${up}`;
  $("across-name").textContent = `${across} →`;
  const what = model.task === "regression" ? "epistemic deviation" : "mutual information";
  $("map-words").textContent = `How ignorant the model is (${what}) as ${across} and ${up} change and the other fields stay: ` +
    "the stronger the colour, the less it knows." +
    (most > (model.threshold ?? Infinity) ? " Where a line is drawn, rows beyond it are unusual." : "") +
    (inside ? " The ring is this row; click to move it." : " This row lies outside of the map.");
  $("map").dataset.drawn = `${across}|${up}`;
}

for (const id of ["across", "up"]) {
  $(id).addEventListener("input", () => {
    last = null;
    changed();
  });
}

$("map").addEventListener("click", (event) => {
  if (!last) return;
  const box = $("map").getBoundingClientRect();
  const shares = [(event.clientX - box.left) / box.width, 1 - (event.clientY - box.top) / box.height];
  last.names.forEach((name, i) => {
    const values = [last.across, last.up][i];
    inputs[name].known?.();
    const step = (values.at(-1) - values[0]) / (values.length - 1);
    const value = values[0] - step / 2 + shares[i] * step * values.length;
    inputs[name].set(Math.min(values.at(-1), Math.max(values[0], value)));
    row[name] = inputs[name].value();
  });
  changed(last.names[0]);
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => last && drawMap());

// ------------------------------------------------------------------------------ scores in words

function scores() {
  const { scores: s, guess: g } = model;
  if (!s || !s.n_rows) return "No held-out scores came with this model: nothing here says how good it is.";
  const start = `On ${number(s.n_rows)} rows that it never saw, `;
  const end = s.unusual === undefined ? "" : ` It called ${percent(s.unusual)} of them unusual.`;
  if (model.task === "classification") {
    return `${start}it was right in ${percent(s.accuracy)}` +
      (g.accuracy === undefined ? "" : ` (always the commonest class: ${percent(g.accuracy)})`) +
      `, and its probabilities were off by ${percent(s.ece)} on average.${end}`;
  }
  return `${start}its mean was off by ${number(s.rmse)} (root mean square` +
    (g.rmse === undefined ? "" : `; always guessing the average: ${number(g.rmse)}`) +
    `). Its 90 % intervals held the truth in ${percent(s.coverage90)} of them and were ${number(s.width90)} wide on average.${end}`;
}
