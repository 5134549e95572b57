// The list of conversations: open, search, rename, delete.

import { h, iconButton, replaceRows } from "./dom.js";
import { matches } from "./talks.js";

export class Sidebar {
  /** `actions`: open(talk), rename(talk, title), remove(talk). */
  constructor(element, actions) {
    Object.assign(this, { element, actions, talks: [], open: null, renaming: null });
    this.list = element.querySelector("ul");
    this.search = element.querySelector("[type=search]");
    this.opener = document.getElementById("open-sidebar");
    this.search.addEventListener("input", () => this.draw());
    this.search.addEventListener("keydown", (event) => this.key(event));
    this.opener.addEventListener("click", () => this.toggle(true));
    element.querySelector("#close-sidebar").addEventListener("click", () => this.toggle(false));
    document.addEventListener("click", (event) => {
      const path = event.composedPath(); // what was clicked may be gone by now
      if (this.isShown && !path.includes(element) && !path.includes(this.opener)) this.toggle(false);
    });
  }

  get isShown() {
    return this.element.classList.contains("is-shown");
  }

  /** Show these, `open` as the one that is open. */
  render(talks, open) {
    Object.assign(this, { talks, open });
    this.draw();
  }

  /** On narrow screens the list lies over the page, or is away. */
  toggle(isShown) {
    const hadFocus = this.element.contains(document.activeElement);
    this.element.classList.toggle("is-shown", isShown);
    this.opener.setAttribute("aria-expanded", String(isShown));
    if (isShown) this.search.focus();
    else if (hadFocus) document.getElementById("message").focus();
  }

  focusSearch() {
    if (this.opener.offsetParent) this.toggle(true);
    this.search.focus();
    this.search.select();
  }

  draw() {
    if (this.renaming) return; // who writes a title goes on with it
    const words = this.search.value.trim();
    this.found = words ? this.talks.filter((talk) => matches(talk, words)) : this.talks;
    const none = h("li", { class: "none" }, words ? "Nothing found" : "Nothing yet");
    replaceRows(this.list, this.found.length ? this.found.map((talk) => this.row(talk)) : [none]);
  }

  row(talk) {
    const isOpen = talk === this.open;
    const title = talk.title || "New conversation";
    const open = h("button", { type: "button", class: "open", title, "aria-current": isOpen ? "page" : null,
      on: { click: () => this.choose(talk) } }, h("span", { dir: "auto" }, title));
    const row = h("li", { class: isOpen ? "is-open" : null, "data-key": talk.id }, open,
      iconButton("edit", `Rename: ${title}`, () => this.rename(talk, row)),
      iconButton("delete", `Delete: ${title}`, () => this.actions.remove(talk)));
    return row;
  }

  rename(talk, row) {
    const input = h("input", { type: "text", "aria-label": "Title", dir: "auto", maxlength: 200 });
    input.value = talk.title;
    const end = (isWanted) => {
      if (this.renaming !== input) return; // it has ended: a field that goes loses the focus too
      this.renaming = null;
      if (isWanted && input.value.trim()) this.actions.rename(talk, input.value.trim());
      else this.draw();
    };
    input.addEventListener("blur", () => end(true));
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
      event.preventDefault(); // what has the focus next gets no key
      end(event.key === "Enter");
    });
    this.renaming = input;
    row.replaceChildren(input);
    input.select();
    input.focus();
  }

  choose(talk) {
    this.actions.open(talk);
    this.toggle(false);
  }

  key(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && this.found.length) {
      event.preventDefault(); // the message field, which has the focus next, gets no key
      this.choose(this.found[0]);
    }
    if (event.key === "ArrowDown") this.list.querySelector(".open")?.focus();
    if (event.key === "Escape") {
      event.stopPropagation();
      this.search.value = "";
      this.draw();
      this.toggle(false);
      document.getElementById("message").focus();
    }
  }
}
