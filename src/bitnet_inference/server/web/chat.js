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
const state = { talks: talks.load(), talk: talks.newTalk(""), models: [], answer: null, frame: 0 };

const thread = new Thread($("log"), $("scroller"), $("to-end"), $("spoken"), {
  start: (text) => send(text),
  edit: (node, text) => state.answer || ask(talks.addMessage(state.talk, node.parent, "user", text)),
  retry: (node) => ask(state.talk.nodes[node.parent]),
  choose: (node) => {
    if (state.answer) return;
    talks.choose(state.talk, node);
    keep(state.talk);
    render();
  },
});
const sidebar = new Sidebar($("sidebar"), {
  open: (talk) => open(talk),
  rename: (talk, title) => {
    talk.title = title;
    keep(talk);
    render();
  },
  remove,
});

// Conversations

function open(talk) {
  state.talk = talk;
  notice(null);
  if (!talk.model || !state.models.some((model) => model.id === talk.model)) talk.model = $("model").value;
  $("model").value = talk.model;
  $("system").value = talk.system;
  render();
}

function startNew() {
  open(talks.newTalk($("model").value));
  sidebar.toggle(false);
  $("message").focus();
}

function remove(talk) {
  if (state.answer?.talk === talk) state.answer.stop();
  talks.forget(talk);
  state.talks = state.talks.filter((each) => each !== talk);
  if (state.talk === talk) startNew();
  else render();
  const undo = () => {
    keep(talk);
    open(talk);
  };
  notice("The conversation is deleted.", "Undo", undo, false);
}

function keep(talk) {
  if (!state.talks.includes(talk)) state.talks.unshift(talk);
  try {
    talks.save(talk);
  } catch (error) {
    notice(error.message);
  }
}

// What the screen shows

function render() {
  const { talk, answer } = state;
  thread.render(talk, answer?.talk === talk ? answer.node : null);
  sidebar.render(state.talks, talk);
  $("title").textContent = talk.title || "New conversation";
  document.title = talk.title ? `${talk.title} · bitnet` : "bitnet";
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

function send(text) {
  if (!text.trim() || state.answer) return;
  ask(talks.addMessage(state.talk, state.talk.leaf, "user", isContinued(state.talk) ? text : text.trim()));
}

async function ask(parent) {
  if (state.answer) return;
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
  if (state.talks.includes(talk)) keep(talk); // unless it was deleted meanwhile
  render();
  $("status").textContent = failure ? "" : answer.controller.signal.aborted ? "Stopped." : "Done.";
  if (failure) fail(failure, talk, parent);
  else if (!modelOf(talk)?.max_model_len) loadModels();
}

function fail(failure, talk, parent) {
  const again = () => {
    if (state.talk !== talk) open(talk);
    ask(parent);
  };
  const model = modelOf(talk);
  if (/chat template/.test(failure.message) && model && model.can_chat !== false) {
    model.can_chat = false;
    again();
  } else if (failure.status === 401) {
    notice(failure.message, "Enter a key", () => askForKey(failure.message, again));
    askForKey(failure.message, () => {
      notice(null);
      again();
    });
  } else notice(failure.message, "Try again", again);
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
  try {
    const found = talks.imported(await file.text());
    for (const talk of found) {
      state.talks = state.talks.filter((each) => each.id !== talk.id);
      state.talks.push(talk);
      talks.save(talk);
    }
    state.talks.sort((one, other) => other.updated - one.updated);
    notice(`${found.length} ${found.length === 1 ? "conversation is" : "conversations are"} imported.`, "", null, false);
    if (found.length) open(found[0]);
  } catch (error) {
    notice(error.message);
  }
  sidebar.render(state.talks, state.talk);
}

// Controls

function grow() {
  const message = $("message");
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight}px`;
}

function editLast() {
  const node = talks.shown(state.talk).findLast((each) => each.role === "user");
  if (node && !state.answer) thread.edit(node);
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
    if (!state.answer) $("composer").requestSubmit();
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
  } else if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (sidebar.isShown) sidebar.toggle(false);
    else state.answer?.stop();
  }
});
$("new").addEventListener("click", startNew);
$("model").addEventListener("change", () => {
  state.talk.model = $("model").value;
  if (state.talks.includes(state.talk)) keep(state.talk);
  render();
});
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("click", (event) => {
  if (event.target === $("settings")) $("settings").close(); // beside the form
});
$("system").addEventListener("input", () => {
  state.talk.system = $("system").value;
  if (state.talks.includes(state.talk)) keep(state.talk);
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
window.addEventListener("pagehide", () => state.answer && keep(state.answer.talk));
window.addEventListener("storage", ({ key }) => {
  if (state.answer) return; // another tab has changed something; what is being written here comes first
  const isOther = !talks.isKept(state.talk, key); // then what is read or edited here stays as it is
  state.talks = talks.load().map((each) => (isOther && each.id === state.talk.id ? state.talk : each));
  if (isOther) return sidebar.render(state.talks, state.talk);
  state.talk = state.talks.find((each) => each.id === state.talk.id) ?? state.talk;
  return render();
});

showSampling($("sampling"));
render();
loadModels();
$("message").focus();
