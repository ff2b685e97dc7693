// What every kind of model shares: questions to the service, and the headline, the gauge and the badge of an answer.
import { gauge } from "./draw.js";

export const $ = (id) => document.getElementById(id);
const troubles = new Map(); // what is wrong with the newest question of each kind
let key = "";

export function useKey(text) {
  key = text;
}

/** What the service answers; an error with its own sentence where it refuses. */
export async function ask(path, body) {
  const headers = { ...(body ? { "Content-Type": "application/json" } : {}), ...(key ? { "X-API-Key": key } : {}) };
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body) });
  const told = await answer.json().catch(() => ({}));
  if (answer.ok) return told;
  const error = new Error(told.error || `The service answered ${answer.status}.`);
  error.status = answer.status;
  error.after = Number(answer.headers.get("Retry-After")) || 1;
  throw error;
}

/** A function that runs `work` with the newest arguments only: one at a time, `pause` ms after the last call. */
export function newest(work, pause) {
  let waiting = null, busy = false, timer = 0;
  const tell = (text) => {
    troubles.set(work, text);
    say([...troubles.values()].find(Boolean) || "", true);
  };
  async function run() {
    if (busy || waiting === null) return;
    const given = waiting;
    waiting = null;
    busy = true;
    let wait = pause;
    try {
      await work(...given, () => waiting !== null); // the last argument tells whether the answer is stale
      tell("");
    } catch (error) {
      if ([429, 503].includes(error.status)) {
        tell(`${error.message} Trying again.`);
        waiting = waiting || given;
        wait = 1000 * error.after;
      } else if (error.status === 401) askForKey();
      else tell(error.message === "Failed to fetch" ? "The service cannot be reached." : error.message);
    } finally {
      busy = false;
    }
    if (waiting !== null) timer = setTimeout(run, wait);
  }
  return (...given) => {
    waiting = given;
    clearTimeout(timer);
    timer = setTimeout(run, pause);
  };
}

export function say(text, wrong = false) {
  $("status").textContent = text;
  $("status").classList.toggle("wrong", wrong && text !== "");
}

export function number(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(value)));
  if (size >= 6 || size < -4) return value.toExponential(2);
  return value.toLocaleString("en", { maximumFractionDigits: Math.max(0, digits - 1 - size), useGrouping: Math.abs(value) >= 1e4 });
}

export const percent = (share) => {
  const shown = 100 * share;
  return `${shown > 0 && shown < 1 ? shown.toFixed(1) : Math.round(shown)}\u00a0%`;
};

/** The headline, the line under it, and the passes and the seed that make the answer again. */
export function headline(text, below, n_passes, seed) {
  $("headline").textContent = text;
  $("subline").textContent = below;
  $("n-passes").textContent = n_passes;
  $("seed").textContent = seed;
}

/** The gauge and its three numbers; `words` says what they are numbers of. */
export function unsure({ epistemic, aleatoric, total, share, most, limit, names, words, digits }) {
  const parts = { epistemic, aleatoric, total };
  for (const [id, value] of Object.entries(parts)) $(id).textContent = value.toFixed(digits);
  ["epistemic-name", "aleatoric-name", "total-name"].forEach((id, i) => { $(id).textContent = names[i]; });
  $("gauge-words").textContent = words;
  gauge($("gauge"), { total, share, most, limit });
  const meter = { valuemin: 0, valuemax: most, valuenow: total };
  for (const [name, value] of Object.entries(meter)) $("gauge").setAttribute(`aria-${name}`, value.toPrecision(4));
  $("gauge").setAttribute("aria-valuetext", `${number(total)} in all, ${percent(share)} of it epistemic`);
}

/** Whether the model is out of its depth, and why that matters. */
export function unusual(flag, ignorance, threshold, what) {
  const place = $("unusual");
  place.hidden = false;
  const known = threshold !== null && threshold !== undefined;
  place.className = flag ? "alarm" : known ? "calm" : "";
  let text;
  if (flag && known && ignorance > threshold) {
    text = `Unusual. The model is more ignorant of this ${what} than of all but one in twenty that it was checked on. ` +
      "It may be far off: do not lean on the answer, look for yourself.";
  } else if (flag) {
    text = `Unusual. This ${what} holds something that the model never met. It may be far off: do not lean on the answer.`;
  } else if (known) text = `Usual. The model is no more ignorant of this ${what} than of nineteen in twenty that it was checked on.`;
  else text = "What is usual is not known: too few rows were held out to check the model on.";
  if (place.textContent !== text) place.textContent = text;
}

export const share = (part, whole) => (whole > 0 ? Math.min(1, Math.max(0, part / whole)) : 0);

export function askForKey() {
  say("");
  $("key-form").hidden = false;
  $("key").focus();
}
