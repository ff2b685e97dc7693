// The page: asks which models there are, and shows the one that is chosen.
import { $, ask, askForKey, say, useKey } from "./common.js";
import { showDigits } from "./digits.js";
import { showTable } from "./table.js";

function show(model) {
  $("main").hidden = false;
  const image = model.task === "image";
  $("fields").hidden = image;
  $("drawing").hidden = !image;
  $("map-card").hidden = true;
  $("unusual").hidden = true;
  $("picture").replaceChildren();
  (image ? showDigits : showTable)(model);
}

async function start() {
  try {
    const { models } = await ask("models");
    say(models.length ? "" : "The service has no model.", !models.length);
    $("key-form").hidden = true;
    $("model").replaceChildren(...models.map((m, i) => new Option(words(m), String(i))));
    $("chooser").hidden = models.length < 2;
    $("model").onchange = () => show(models[Number($("model").value)]);
    if (models.length) show(models[0]);
  } catch (error) {
    if (error.status === 401) askForKey();
    else say(`The models could not be had: ${error.message}`, true);
  }
}

function words(model) {
  return model.task === "image" ? `${model.name}: digits drawn by hand` : `${model.name}: ${model.target} from a table`;
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  $("key").value = "";
  start();
});
start();
