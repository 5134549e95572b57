// What the page asks of the server.

const KEY = "bitnet.key";
const CUT = "The connection ended before the answer did.";

/** An error that a person can read. `status` is 0 where no answer came. */
export class Refused extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The API key, or null. */
export function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

/** Whether the browser keeps the API key when the tab is closed. */
export function isKeyKept() {
  try {
    return localStorage.getItem(KEY) !== null;
  } catch {
    return false;
  }
}

/** Use this key for as long as the tab is open, or `keep` it in the browser; null forgets it. */
export function storeKey(key, keep) {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (key) (keep ? localStorage : sessionStorage).setItem(KEY, key);
}

async function ask(path, options = {}) {
  const key = storedKey();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    // A key with letters that no header can have ends up here too.
    throw new Refused(0, "The server does not answer: is it running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // Not from our server: a proxy's page, say.
  }
  const message = error?.message ?? `The server answers ${response.status} ${response.statusText}`;
  return new Refused(response.status, String(message), error?.code ?? null);
}

/** The JSON at a path. */
export async function get(path, signal) {
  const response = await ask(path, { signal });
  return response.json();
}

/** The events of a streamed answer, one parsed object after the other, up to [DONE]. */
export async function* stream(path, body, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const value = JSON.parse(data);
    if (value.error) throw new Refused(response.status, String(value.error.message), value.error.code);
    yield value;
  }
  throw new Refused(0, CUT);
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new Refused(0, CUT);
      });
      if (done) return;
      const blocks = (held + value.replaceAll("\r", "")).split("\n\n");
      held = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
