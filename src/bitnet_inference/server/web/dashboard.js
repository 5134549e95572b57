// What the server does now: asked for once a second, and not at all while nobody looks.

import { get } from "./api.js";
import { h, whole } from "./dom.js";
import { askForKey } from "./keydialog.js";
import { Lines } from "./lines.js";

const EVERY_MS = 1000;
const RECENT = 10, LONG = 60; // seconds that averages are of
const $ = (id) => document.getElementById(id);
const seconds = (value) => (value < 1 ? [(value * 1000).toPrecision(value < 0.1 ? 2 : 3), "ms"] : [value.toFixed(2), "s"]);
const bytes = (value) => (value < 1e9 ? [(value / 1e6).toFixed(value < 1e8 ? 1 : 0), "MB"] : [(value / 1e9).toFixed(2), "GB"]);
const percent = (value) => [(value * 100).toFixed(value < 0.1 ? 1 : 0), "%"];
const number = (unit) => (value) => [whole(value), unit];

const charts = {
  speed: new Lines("Speed", { format: number("tokens/s"), least: 10 }),
  first: new Lines("Time to first token", { format: seconds, least: 0.01, note: "mean of 10 s" }),
  requests: new Lines("Requests", { series: ["running", "waiting"], format: number(""), least: 2 }),
  cache: new Lines("Cache in use", { format: percent, least: 1, note: "blocks that requests hold" }),
  hits: new Lines("Prompts from the cache", { format: percent, least: 1, note: "tokens, of a minute" }),
  memory: new Lines("Memory", { format: bytes, least: 1e6, note: "weights and caches" }),
};
$("charts").append(...Object.values(charts).map((chart) => chart.element));

const moments = []; // sums over all models
let timer = 0, isAsking = false;

async function ask() {
  clearTimeout(timer);
  if (document.hidden || isAsking) return;
  isAsking = true;
  try {
    show(await get("/stats", AbortSignal.timeout(10 * EVERY_MS)));
    timer = setTimeout(ask, EVERY_MS);
  } catch (error) {
    fail(error);
  } finally {
    isAsking = false;
  }
}

function fail(error) {
  $("status").textContent = "Not connected";
  $("status").className = "";
  $("notice").hidden = false;
  const isMissing = error.status === 404;
  $("notice").firstChild.textContent = isMissing ? "This server does not count what it does: there is nothing to show." : error.message;
  $("enter-key").hidden = error.status !== 401;
  $("enter-key").onclick = () => askForKey(error.message, ask);
  if (error.status === 401) askForKey(error.message, ask);
  else if (!isMissing) timer = setTimeout(ask, 5 * EVERY_MS);
}

function show(stats) {
  $("notice").hidden = true;
  $("status").textContent = "Live";
  $("status").className = "is-live";
  const moment = { time: stats.time, ...sums(stats.models) };
  const past = moments.at(-1);
  if (past && (moment.tokens < past.tokens)) moments.length = 0; // the server began anew
  moments.push(moment);
  while (moment.time - moments[0].time > LONG + 0.5) moments.shift();
  draw(moment, stats.memory);
  $("models").replaceChildren(...stats.models.map(row));
  const none = h("li", { class: "none" }, "None.");
  $("failures").replaceChildren(...(stats.failures.length ? stats.failures.map(failure) : [none]));
  const most = bytes(stats.memory.max_bytes).join(" ");
  $("about").textContent = `bitnet-inference ${stats.version} · started ${new Date(stats.started * 1000).toLocaleString()} · up to ${most} for models`;
}

function sums(models) {
  const sum = (of) => models.reduce((total, model) => total + (model.counts ? of(model.counts) : 0), 0);
  return {
    tokens: sum(tokens),
    firsts: sum((counts) => counts.first_token_s.count),
    firstSeconds: sum((counts) => counts.first_token_s.sum),
    running: sum((counts) => counts.now.running),
    waiting: sum((counts) => counts.now.waiting),
    blocks: sum((counts) => counts.now.blocks),
    blocksUsed: sum((counts) => counts.now.blocks_used),
    prompts: sum((counts) => counts.total.prompt_tokens),
    cached: sum((counts) => counts.total.cached_tokens),
  };
}

function tokens(counts) {
  return counts.first_token_s.count + counts.token_gap_s.count;
}

function draw(now, memory) {
  const last = moments.at(-2), recent = moments.find((each) => now.time - each.time <= RECENT + 0.5), long = moments[0];
  charts.speed.add(now.time, [last ? (now.tokens - last.tokens) / (now.time - last.time) : 0]);
  charts.first.add(now.time, [share(now.firstSeconds - recent.firstSeconds, now.firsts - recent.firsts)]);
  charts.requests.add(now.time, [now.running, now.waiting]);
  charts.cache.add(now.time, [share(now.blocksUsed, now.blocks)]);
  charts.hits.add(now.time, [share(now.cached - long.cached, now.prompts - long.prompts)]);
  charts.memory.add(now.time, [memory.used_bytes]);
}

function share(part, all) {
  return all > 0 ? part / all : null;
}

function row(model) {
  const { counts } = model;
  const mean = (histogram) => (histogram?.count ? seconds(histogram.sum / histogram.count).join(" ") : "–");
  const count = (value) => (value === undefined || value === null ? "–" : whole(value));
  const { total, now } = counts ?? {};
  const hits = total?.prompt_tokens ? percent(total.cached_tokens / total.prompt_tokens).join(" ") : "–";
  const values = [
    model.state, count(model.max_model_len), model.num_bytes ? bytes(model.num_bytes).join(" ") : "–",
    count(now?.running), count(now?.waiting), count(total?.requests), count(total?.prompt_tokens), hits,
    count(counts && tokens(counts)), mean(counts?.first_token_s), mean(counts?.token_gap_s), count(counts && (counts.finished.error ?? 0)),
  ];
  return h("tr", {}, h("th", { scope: "row" }, model.names.join(", ")), ...values.map((value) => h("td", {}, value)));
}

function failure({ time, model, message }) {
  return h("li", {}, h("time", {}, new Date(time * 1000).toLocaleTimeString()), `${model}: ${message}`);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) $("status").textContent = "Paused";
  else ask();
});
ask();
