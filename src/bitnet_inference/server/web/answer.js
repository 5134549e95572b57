// Gets an answer, piece by piece.

import { stream } from "./api.js";
import { whole } from "./dom.js";

const CONTINUED_TOKENS = 256; // of a text without an end, where nobody says

/** An answer that is on its way. `node` gets its text. */
export class Answer {
  constructor(talk, node) {
    Object.assign(this, { talk, node, usage: null, reason: null, first: null, last: null });
    this.controller = new AbortController();
    this.begin = performance.now();
  }

  stop() {
    this.controller.abort();
  }

  /** Answer the messages, or go on with their text where the model has no chat template. Throws Refused and AbortError. */
  async run(messages, options, isContinued, changed) {
    const common = { model: this.talk.model, ...options };
    const body = isContinued
      ? { max_tokens: CONTINUED_TOKENS, ...common, prompt: messages.map((each) => each.text).join("") }
      : { ...common, messages: asked(this.talk, messages) };
    const path = isContinued ? "/v1/completions" : "/v1/chat/completions";
    for await (const event of stream(path, body, this.controller.signal)) {
      if (event.usage) this.usage = event.usage;
      const choice = event.choices?.[0];
      const text = (isContinued ? choice?.text : choice?.delta?.content) ?? "";
      if (choice?.finish_reason) this.reason = choice.finish_reason;
      if (typeof text !== "string" || !text) continue;
      this.last = performance.now();
      this.first ??= this.last;
      this.node.text += text;
      changed();
    }
  }

  /** What it has cost, in a line. */
  note() {
    const parts = [];
    if (this.usage) {
      // An answer that is there at once is timed as a whole: its pieces may have come in one.
      const tokens = this.usage.completion_tokens, since = this.last - this.first < 500 ? this.begin : this.first;
      const seconds = (this.last - since) / 1000;
      parts.push(`${whole(tokens)} tokens`);
      if (tokens > 1 && this.first !== null) parts.push(`${whole((tokens - 1) / seconds)} tokens/s`);
    }
    if (this.first !== null) parts.push(`first after ${((this.first - this.begin) / 1000).toFixed(2)} s`);
    if (this.controller.signal.aborted) parts.push("stopped");
    if (this.reason === "length") parts.push("at its limit of tokens");
    if (this.reason === "content_filter") parts.push("ended by a filter");
    return parts.join(" · ");
  }
}

function asked(talk, messages) {
  const system = talk.system.trim() ? [{ role: "system", content: talk.system }] : [];
  return [...system, ...messages.map(({ role, text }) => ({ role, content: text }))];
}
