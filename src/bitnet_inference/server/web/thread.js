// The conversation on the screen.

import { copyButton, h, iconButton, replaceRows } from "./dom.js";
import { show } from "./markdown.js";
import { shown, siblings } from "./talks.js";

const STARTS = ["Tell me a story about a brave fox called Mia", "Tell me a story about a shy owl called Nora"];
const NEAR = 80; // pixels: who is this near the end wants to see what comes

export class Thread {
  /** `actions`: start(text), edit(node, text), retry(node), choose(node). */
  constructor(log, scroller, toEnd, spoken, actions) {
    Object.assign(this, { log, scroller, toEnd, spoken, actions });
    this.follows = true;
    scroller.addEventListener("scroll", () => this.noteScroll(), { passive: true });
    toEnd.addEventListener("click", () => this.goToEnd());
    new ResizeObserver(() => this.follows && this.goToEnd()).observe(scroller);
  }

  /** Show a conversation anew; `writing` is the message that is being written, or null. Who edits one goes on with it. */
  render(talk, writing) {
    const path = shown(talk), isSame = this.talk?.id === talk.id, top = this.scroller.scrollTop;
    const editing = isSame && !writing ? this.log.querySelector("article:has(.editor)") : null;
    this.talk = talk;
    const row = (node) => (node.id === editing?.dataset.key ? editing : this.message(talk, node, node === writing));
    const rows = path.map(row);
    replaceRows(this.log, rows.length ? rows : [this.welcome()]);
    if (writing) this.spoken.replaceChildren();
    if (!isSame || (this.follows && !rows.includes(editing))) this.goToEnd();
    else this.scroller.scrollTop = top; // who reads further up, or edits, stays there
    this.noteScroll();
  }

  /** The message that is being written has got longer, or is complete. */
  update(node, isComplete = false) {
    const text = this.log.querySelector(`[data-key="${node.id}"] .text`);
    if (!text) return;
    fill(text, node);
    this.speak(text, isComplete);
    if (this.follows) this.goToEnd();
    else this.noteScroll();
  }

  /** Let somebody change a message; its branch stays. */
  edit(node) {
    if (this.log.querySelector(".is-writing")) return;
    const article = this.log.querySelector(`[data-key="${node.id}"]`);
    const rows = Math.min(12, node.text.split("\n").length + 1);
    const area = h("textarea", { "aria-label": "Edit the message", dir: "auto", rows });
    area.value = node.text;
    const cancel = () => {
      editing.replaceWith(article);
      article.querySelector("button").focus();
    };
    const save = (event) => {
      event.preventDefault();
      if (area.value.trim()) this.actions.edit(node, area.value);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) save(event);
      if (event.key === "Escape" && !event.isComposing) {
        event.stopPropagation();
        cancel();
      }
    });
    const buttons = h("div", {},
      h("button", { type: "button", on: { click: cancel } }, "Cancel"),
      h("button", { class: "strong" }, "Send"));
    const form = h("form", { class: "editor", on: { submit: save } }, area, buttons);
    const editing = h("article", { class: "message user", "data-key": node.id }, form);
    article.replaceWith(editing);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  goToEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.noteScroll();
  }

  noteScroll() {
    const { scrollTop, clientHeight, scrollHeight } = this.scroller;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR;
    this.toEnd.hidden = this.follows;
  }

  /** Screen readers hear each paragraph once, when it is complete. */
  speak(text, isComplete) {
    const blocks = text.children.length ? [...text.children] : [text];
    const ready = isComplete ? blocks : blocks.slice(0, -1);
    for (const block of ready.slice(this.spoken.children.length)) this.spoken.append(h("p", {}, block.textContent));
  }

  welcome() {
    const starts = STARTS.map((text) => h("button", { type: "button", on: { click: () => this.actions.start(text) } }, text));
    return h("section", { class: "welcome", "data-key": "welcome" },
      h("h2", {}, "What shall we talk about?"),
      h("p", {}, "Everything stays between this browser and your server."),
      h("div", { class: "starts" }, ...starts));
  }

  message(talk, node, isWriting) {
    const isUser = node.role === "user";
    const text = h("div", { class: node.isPlain ? "text plain" : "text", dir: "auto" });
    fill(text, node);
    return h("article", { class: `message ${node.role}${isWriting ? " is-writing" : ""}`, "data-key": node.id, "aria-busy": isWriting ? "true" : null },
      h("h2", { class: "who" }, isUser ? "You" : node.model ?? talk.model),
      text,
      h("div", { class: "tools" },
        copyButton("Copy the message", () => node.text),
        isUser && iconButton("edit", "Edit the message", () => this.edit(node)),
        !isUser && iconButton("retry", "Answer again", () => this.actions.retry(node)),
        this.branches(talk, node),
        node.note && h("span", { class: "cost" }, node.note)));
  }

  branches(talk, node) {
    const all = siblings(talk, node), at = all.indexOf(node);
    if (all.length < 2) return null;
    const step = (by, name, label) => {
      const button = iconButton(name, label, () => this.actions.choose(all[at + by]));
      button.disabled = !all[at + by];
      return button;
    };
    return h("span", {}, step(-1, "before", "Earlier version"), ` ${at + 1} of ${all.length} `, step(1, "after", "Later version"));
  }
}

function fill(element, node) {
  if (node.role === "assistant" && !node.isPlain) show(element, node.text);
  else element.textContent = node.text;
}
