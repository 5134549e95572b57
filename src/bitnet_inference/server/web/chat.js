// The page: what happens when somebody writes, clicks or presses a key.

import { Answer } from "./answer.js";
import { get } from "./api.js";
import { h, whole } from "./dom.js";
import { askForKey } from "./keydialog.js";
import { clearSampling, sampling, showSampling } from "./sampling.js";
import { Sidebar } from "./sidebar.js";
import * as talks from "./talks.js";
import { Thread } from "./thread.js";

const $ = (id) => document.getElementById(id);
const state = { talks: talks.load(), talk: talks.newTalk(""), models: [], answer: null, frame: 0, unsaved: new Set() };
const BUSY = "Another conversation is being answered: wait for it, or stop it (Esc).";

const thread = new Thread($("log"), $("scroller"), $("to-end"), $("spoken"), {
  start: (text) => send(text),
  edit: (node, text) => isBusy() || ask(talks.addMessage(state.talk, node.parent, "user", text)),
  retry: (node) => ask(state.talk.nodes[node.parent]),
  choose: (node) => {
    if (state.answer?.talk === state.talk) return;
    talks.choose(state.talk, node);
    keep(state.talk);
    render();
  },
});
const sidebar = new Sidebar($("sidebar"), {
  open: (talk) => {
    notice(null);
    open(talk);
  },
  rename: (talk, title) => {
    const renamed = current(talk);
    renamed.title = title;
    keepAgain(renamed);
    render();
  },
  remove,
});

// Conversations

function open(talk) {
  state.talk = talk;
  if (!talk.model || (state.models.length && !modelOf(talk))) talk.model = $("model").value;
  render();
}

/** The same conversation as it is now: when another tab changes it, it becomes another object. */
function current(talk) {
  return state.talks.find((each) => each.id === talk.id) ?? talk;
}

function startNew() {
  notice(null);
  open(talks.newTalk($("model").value));
  sidebar.toggle(false);
  $("message").focus();
}

function remove(talk) {
  if (state.answer?.talk === talk) state.answer.stop();
  talks.forget(talk);
  state.unsaved.delete(talk.id);
  state.talks = state.talks.filter((each) => each !== talk);
  if (state.talk === talk) startNew();
  else render();
  for (const id of [...state.unsaved]) keepAgain(current({ id })); // there is more room now
  const undo = () => {
    keep(talk);
    open(talk);
  };
  const rest = state.unsaved.size ? " There is still no room for all that is new: delete more." : "";
  notice(`The conversation is deleted.${rest}`, "Undo", undo, false);
}

function keep(talk) {
  if (!state.talks.includes(talk)) state.talks.unshift(talk);
  try {
    talks.save(talk);
    state.unsaved.delete(talk.id);
  } catch (error) {
    state.unsaved.add(talk.id);
    notice(error.message);
  }
}

/** Keep it if it is in the list: it may be new, or deleted by now. */
function keepAgain(talk) {
  if (state.talks.includes(talk)) keep(talk);
}

/** Another tab has changed what is kept under `key`. What is being written, read or edited here goes on. */
function takeOver(key) {
  const { talk, answer } = state, stored = talks.load();
  const find = (list, { id }) => list.find((each) => each.id === id);
  if (answer && talks.isKept(answer.talk, key)) {
    const changed = find(stored, answer.talk);
    if (changed) talks.merge(answer.talk, changed, answer.node);
    else if (!state.unsaved.has(answer.talk.id)) answer.stop(); // it is deleted
  }
  const isUntouched = talk === answer?.talk || !talks.isKept(talk, key); // then the thread stays as it is
  const isHeld = (each) => state.unsaved.has(each.id) || each === answer?.talk || (isUntouched && each === talk);
  const held = state.talks.filter(isHeld);
  const unkept = held.filter((each) => state.unsaved.has(each.id) && !find(stored, each));
  state.talks = [...unkept, ...stored.map((each) => find(held, each) ?? each)];
  if (isUntouched) return renderList();
  state.talk = current(talk);
  return render();
}

// What the screen shows

function render() {
  const { talk, answer } = state;
  thread.render(talk, answer?.talk === talk ? answer.node : null);
  renderList();
  $("model").value = talk.model;
  $("system").value = talk.system;
  const button = $("send");
  button.setAttribute("aria-label", answer ? "Stop" : "Send");
  button.title = answer ? "Stop (Esc)" : "Send (Enter)";
  const use = button.querySelector("use");
  use.setAttribute("href", use.getAttribute("href").replace(/#.*/, answer ? "#stop" : "#send"));
  const hint = "This model has no chat template: it goes on with your text instead of answering it.";
  $("hint").textContent = hint;
  $("hint").hidden = !isContinued(talk);
  $("message").placeholder = isContinued(talk) ? "Write the beginning of a text" : "Write a message";
  showContext();
}

function renderList() {
  const { talk } = state;
  sidebar.render(state.talks, talk);
  $("title").textContent = talk.title || "New conversation";
  document.title = talk.title ? `${talk.title} · bitnet` : "bitnet";
}

function showContext() {
  const { max_model_len: most } = modelOf(state.talk) ?? {};
  const used = talks.shown(state.talk).findLast((node) => node.used)?.used ?? 0;
  $("context").hidden = !most && !used;
  $("used").textContent = most ? `${whole(used)} of ${whole(most)} tokens` : `${whole(used)} tokens`;
  const meter = $("meter");
  meter.hidden = !most;
  meter.value = most ? Math.min(1, used / most) : 0;
  meter.classList.toggle("is-full", meter.value > 0.85);
}

function notice(text, label = "", action = null, isFailure = true) {
  const box = $("notice");
  box.hidden = !text;
  box.className = isFailure ? "failure" : "failure is-mild";
  if (!text) return box.replaceChildren();
  const act = () => {
    notice(null);
    action();
  };
  const close = h("button", { type: "button", on: { click: () => notice(null) } }, "Close");
  return box.replaceChildren(h("span", {}, text), ...(action ? [h("button", { type: "button", on: { click: act } }, label)] : []), close);
}

// Questions and answers

/** Whether an answer is being written, which leaves no room for another one. */
function isBusy() {
  if (state.answer && state.answer.talk !== state.talk) notice(BUSY, "", null, false);
  return state.answer !== null;
}

function send(text) {
  if (!text.trim() || isBusy()) return;
  ask(talks.addMessage(state.talk, state.talk.leaf, "user", isContinued(state.talk) ? text : text.trim()));
}

async function ask(parent) {
  if (isBusy()) return;
  const { talk } = state;
  const messages = talks.shown({ ...talk, leaf: parent.id });
  const node = talks.addMessage(talk, parent.id, "assistant", "");
  node.model = talk.model;
  if (isContinued(talk)) node.isPlain = true;
  const answer = new Answer(talk, node);
  Object.assign(state, { answer });
  talk.updated = Date.now();
  notice(null);
  keep(talk);
  state.talks.sort((one, other) => other.updated - one.updated);
  thread.follows = true;
  render();
  $("status").textContent = "Writing…";
  let failure = null;
  try {
    await answer.run(messages, sampling($("sampling")), isContinued(talk), () => draw(answer));
  } catch (error) {
    if (error.name !== "AbortError") failure = error;
  }
  ended(answer, parent, failure);
}

function draw(answer) {
  if (state.frame) return;
  state.frame = requestAnimationFrame(() => {
    state.frame = 0;
    if (state.talk === answer.talk && state.answer === answer) thread.update(answer.node);
  });
}

function ended(answer, parent, failure) {
  const { talk, node } = answer;
  if (state.talk === talk) thread.update(node, true);
  state.answer = null;
  node.note = answer.note();
  if (answer.usage) node.used = answer.usage.total_tokens;
  if (failure && !node.text) talks.dropMessage(talk, node);
  if ($("notice").textContent.startsWith(BUSY)) notice(null);
  keepAgain(talk);
  render();
  $("status").textContent = failure ? "" : answer.controller.signal.aborted ? "Stopped." : "Done.";
  if (failure) fail(failure, talk, parent);
  else if (!modelOf(talk)?.max_model_len) loadModels();
}

async function fail(failure, talk, parent) {
  const again = async () => {
    if (!state.models.length) await loadModels();
    if (state.talk !== current(talk)) open(current(talk));
    ask(parent);
  };
  if (failure.status === 401) {
    notice(failure.message, "Enter a key", () => askForKey(failure.message, again));
    return askForKey(failure.message, () => {
      notice(null);
      again();
    });
  }
  if (failure.status && modelOf(talk)?.can_chat === undefined) {
    await loadModels(); // it was not loaded before: only now the server knows whether it has a chat template
    if (isContinued(talk) && state.talk === current(talk) && !state.answer) return again();
  }
  return notice(failure.message, "Try again", again);
}

// Models

function modelOf(talk) {
  return state.models.find((model) => model.id === talk.model);
}

function isContinued(talk) {
  return modelOf(talk)?.can_chat === false;
}

async function loadModels() {
  try {
    const { data } = await get("/v1/models");
    state.models = data;
    const select = $("model");
    const wanted = state.talk.model || select.value;
    select.replaceChildren(...data.map((model) => h("option", { value: model.id }, model.id)));
    select.value = data.some((model) => model.id === wanted) ? wanted : data[0].id;
    state.talk.model = select.value;
    if (!state.answer) render();
  } catch (error) {
    if (error.status === 401) askForKey(error.message, loadModels);
    else notice(error.message, "Try again", loadModels);
  }
}

// Files

function download() {
  const address = URL.createObjectURL(new Blob([talks.exported(state.talks)], { type: "application/json" }));
  const day = new Date().toISOString().slice(0, 10);
  h("a", { href: address, download: `bitnet-conversations-${day}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

async function upload(file) {
  let found = [];
  try {
    found = talks.imported(await file.text());
  } catch (error) {
    return notice(error.message);
  }
  const isOld = (talk) => state.talks.some((each) => each.id === talk.id && each.updated >= talk.updated);
  const old = found.filter(isOld), taken = [], lost = [];
  for (const talk of found) if (!old.includes(talk)) (take(talk) ? taken : lost).push(talk);
  state.talks.sort((one, other) => other.updated - one.updated);
  if (taken.length) open(taken[0]);
  const count = (list) => `${list.length} ${list.length === 1 ? "conversation is" : "conversations are"}`;
  const told = [`${count(taken)} imported.`];
  if (old.length) told.push(`${count(old)} left alone: what is here is no older.`);
  const names = lost.map((talk) => talk.title || "New conversation").join(", ");
  if (names) told.push(`The browser has no room for ${names}.`);
  return notice(told.join(" "), "", null, lost.length > 0);
}

/** Take a conversation out of a file, in place of the one here. Whether there was room for it. */
function take(talk) {
  try {
    talks.save(talk);
  } catch {
    return false;
  }
  state.unsaved.delete(talk.id);
  state.talks = [talk, ...state.talks.filter((each) => each.id !== talk.id)];
  return true;
}

// Controls

function grow() {
  const message = $("message");
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight}px`;
}

function editLast() {
  const node = talks.shown(state.talk).findLast((each) => each.role === "user");
  if (node) thread.edit(node);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (state.answer) return state.answer.stop();
  const message = $("message"), text = message.value;
  if (!text.trim()) return undefined;
  message.value = "";
  grow();
  return send(text);
});
$("message").addEventListener("input", grow);
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!isBusy()) $("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !event.target.value) {
    event.preventDefault();
    editLast();
  }
});
document.addEventListener("keydown", (event) => {
  const isCommand = event.ctrlKey || event.metaKey;
  if (isCommand && !event.shiftKey && event.key.toLowerCase() === "k") {
    event.preventDefault();
    sidebar.focusSearch();
  } else if (isCommand && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    startNew();
  } else if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) {
    if (sidebar.isShown) sidebar.toggle(false);
    else state.answer?.stop();
  }
});
$("new").addEventListener("click", startNew);
$("model").addEventListener("change", () => {
  state.talk.model = $("model").value;
  keepAgain(state.talk);
  render();
});
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("click", (event) => {
  if (event.target === $("settings")) $("settings").close(); // beside the form
});
$("system").addEventListener("input", () => {
  state.talk.system = $("system").value;
  keepAgain(state.talk);
});
$("recommended").addEventListener("click", () => clearSampling($("sampling")));
$("change-key").addEventListener("click", () => askForKey("It is sent with every request to this server.", loadModels));
$("export").addEventListener("click", download);
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (file) await upload(file);
  event.target.value = "";
});
const keepAnswer = () => state.answer && keepAgain(state.answer.talk);
window.addEventListener("pagehide", keepAnswer);
document.addEventListener("visibilitychange", keepAnswer); // a phone may end a hidden page without a word
window.addEventListener("storage", ({ key }) => takeOver(key));

showSampling($("sampling"));
render();
loadModels();
$("message").focus();
