// How the next token is chosen. A field that is empty is not sent: the model's own recommendation holds.

import { h } from "./dom.js";

const KEY = "bitnet.sampling";
const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 5, step: 0.05 },
  { name: "top_p", label: "Top-p", min: 0, max: 1, step: 0.01 },
  { name: "top_k", label: "Top-k", min: 0, step: 1 },
  { name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.01 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.05, max: 5, step: 0.05 },
  { name: "seed", label: "Seed", min: 0, step: 1, placeholder: "random" },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1, placeholder: "no limit" },
];
const WHEN_FULL = [
  ["", "The answer ends"],
  ["keep_system", "The oldest messages are forgotten"],
  ["sliding", "The text slides on"],
];

/** Fill the fieldset; what is changed is kept. */
export function showSampling(fieldset) {
  const kept = read();
  for (const { name, label, ...range } of FIELDS) {
    const input = h("input", { type: "number", name, inputmode: "decimal", placeholder: "recommended", ...range, value: kept[name] ?? null });
    fieldset.append(h("label", { class: "field" }, label, input));
  }
  const stop = h("textarea", { name: "stop", rows: 2, placeholder: "None" });
  stop.value = kept.stop ?? "";
  fieldset.append(h("label", { class: "field whole" }, "Stop at these texts, one a line (\\n is a new line)", stop));
  const full = h("select", { name: "overflow" }, ...WHEN_FULL.map(([value, words]) => h("option", { value }, words)));
  full.value = kept.overflow ?? "";
  fieldset.append(h("label", { class: "field whole" }, "When the context is full", full));
  fieldset.addEventListener("input", () => write(fieldset));
}

/** Back to the model's own. */
export function clearSampling(fieldset) {
  for (const input of fieldset.querySelectorAll("input, textarea, select")) input.value = "";
  write(fieldset);
}

/** The fields of a request. */
export function sampling(fieldset) {
  const chosen = {};
  for (const { name } of FIELDS) {
    const value = fieldset.querySelector(`[name=${name}]`).value;
    if (value !== "") chosen[name] = Number(value);
  }
  const overflow = fieldset.querySelector("[name=overflow]").value;
  if (overflow) chosen.overflow = overflow;
  const stops = fieldset.querySelector("[name=stop]").value.split("\n").filter(Boolean);
  if (stops.length) chosen.stop = stops.map((each) => each.replaceAll("\\n", "\n"));
  return chosen;
}

function read() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? {};
  } catch {
    return {};
  }
}

function write(fieldset) {
  const values = {};
  for (const input of fieldset.querySelectorAll("input, textarea, select")) if (input.value) values[input.name] = input.value;
  try {
    localStorage.setItem(KEY, JSON.stringify(values));
  } catch {
    // They hold until the page is left.
  }
}
