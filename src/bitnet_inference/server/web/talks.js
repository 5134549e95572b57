// Conversations, kept in the browser. A conversation is a tree: what was edited or asked again stays beside what replaced it.

const PREFIX = "bitnet.talk.";
const MAX_IMPORT = 20_000_000; // characters

/** A new conversation. `leaf` is the last message of the branch that is shown. */
export function newTalk(model) {
  const now = Date.now();
  return { id: crypto.randomUUID?.() ?? `${now}-${Math.random()}`, title: "", created: now, updated: now, model, system: "", nodes: {}, leaf: null };
}

/** A message behind `parent` (null: the first), which becomes what is shown. */
export function addMessage(talk, parent, role, text) {
  // A number of chance is added, so that two tabs at the same moment don't give the same id.
  const id = String(1 + Math.max(0, ...Object.keys(talk.nodes).map(Number)) + Math.floor(1000 * Math.random()));
  talk.nodes[id] = { id, parent, role, text };
  talk.leaf = id;
  if (!talk.title && role === "user") talk.title = [...text.trim().replace(/\s+/g, " ")].slice(0, 80).join("");
  return talk.nodes[id];
}

/** Take over how another tab has changed a conversation; `node`, which is written here, and what it answers stay. */
export function merge(talk, stored, node) {
  const own = Object.fromEntries(shown({ ...talk, leaf: node.id }).map((each) => [each.id, each]));
  const { title, system, model, updated } = stored;
  Object.assign(talk, { title, system, model, updated, nodes: { ...stored.nodes, ...own } });
}

/** Take back a message, unless another one follows it. */
export function dropMessage(talk, node) {
  if (Object.values(talk.nodes).some((each) => each.parent === node.id)) return;
  delete talk.nodes[node.id];
  const left = siblings(talk, node);
  if (left.length) choose(talk, left.at(-1));
  else talk.leaf = node.parent;
}

/** The messages that are shown, from the first to the last. */
export function shown(talk) {
  const path = [];
  for (let node = talk.nodes[talk.leaf]; node; node = talk.nodes[node.parent]) path.unshift(node);
  return path;
}

/** A message and those that stand in its place on other branches, in the order they were made. */
export function siblings(talk, node) {
  return Object.values(talk.nodes).filter((each) => each.parent === node.parent);
}

/** Show the branch of this message, to its newest end. */
export function choose(talk, node) {
  talk.leaf = node.id;
  for (let next = node; next; ) {
    talk.leaf = next.id;
    next = Object.values(talk.nodes).findLast((each) => each.parent === talk.leaf);
  }
}

/** What the browser keeps, the one that was changed last first. What cannot be read is left alone. */
export function load() {
  const talks = [];
  try {
    for (const key of Object.keys(localStorage)) {
      if (!key.startsWith(PREFIX)) continue;
      const talk = checked(parsed(localStorage.getItem(key)));
      if (talk) talks.push(talk);
    }
  } catch {
    // A browser that keeps nothing.
  }
  return talks.sort((one, other) => other.updated - one.updated);
}

/** Keep a conversation. Throws an Error that says what to do. */
export function save(talk) {
  try {
    localStorage.setItem(PREFIX + talk.id, JSON.stringify(talk));
  } catch (error) {
    const isFull = error.name === "QuotaExceededError" || error.name === "NS_ERROR_DOM_QUOTA_REACHED";
    throw new Error(isFull
      ? "This browser has no room for more: this conversation is lost when the page is closed. Export it, or delete others."
      : "This browser keeps no conversations: this one is lost when the page is closed. Export it.");
  }
}

/** Whether the browser keeps this conversation under `key`; null stands for all keys. */
export function isKept(talk, key) {
  return key === null || key === PREFIX + talk.id;
}

/** Forget a conversation. */
export function forget(talk) {
  try {
    localStorage.removeItem(PREFIX + talk.id);
  } catch {
    // It was not kept.
  }
}

/** Whether somebody who looks for `words` means this conversation. */
export function matches(talk, words) {
  const text = [talk.title, talk.system, ...Object.values(talk.nodes).map((node) => node.text)].join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

/** Conversations as the text of a file. */
export function exported(talks) {
  return JSON.stringify({ format: "bitnet conversations", version: 1, talks }, null, 1);
}

/** The conversations in the text of a file. Throws an Error. */
export function imported(text) {
  if (text.length > MAX_IMPORT) throw new Error("The file is too large for this browser to keep.");
  const file = parsed(text);
  if (file?.format !== "bitnet conversations" || !Array.isArray(file.talks)) {
    throw new Error("This is no file of conversations: choose one that was exported here.");
  }
  const talks = file.talks.map(checked);
  const wrong = talks.indexOf(null);
  if (wrong !== -1) throw new Error(`Conversation ${wrong + 1} of the file is broken: nothing was imported.`);
  return talks;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

// Files and what is kept may come from anybody: only what we know is taken over, with the types that we expect.
function checked(talk) {
  if (!isObject(talk) || !isObject(talk.nodes)) return null;
  const strings = [talk.id, talk.title, talk.model, talk.system];
  if (!strings.every((each) => typeof each === "string") || !Number.isFinite(talk.created) || !Number.isFinite(talk.updated)) return null;
  const nodes = {};
  for (const [id, node] of Object.entries(talk.nodes)) {
    // A parent is older than its children, so there are no circles.
    const hasParent = node?.parent === null || (typeof node?.parent === "string" && Object.hasOwn(nodes, node.parent));
    if (!/^\d{1,9}$/.test(id) || !hasParent || typeof node.text !== "string" || !["user", "assistant"].includes(node.role)) return null;
    nodes[id] = { id, parent: node.parent, role: node.role, text: node.text };
    for (const name of ["note", "model"]) if (typeof node[name] === "string") nodes[id][name] = node[name];
    if (node.isPlain === true) nodes[id].isPlain = true;
    if (Number.isFinite(node.used)) nodes[id].used = node.used;
  }
  const leaf = typeof talk.leaf === "string" && Object.hasOwn(nodes, talk.leaf) ? talk.leaf : null;
  const { id, title, created, updated, model, system } = talk;
  return { id, title, created, updated, model, system, nodes, leaf };
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
