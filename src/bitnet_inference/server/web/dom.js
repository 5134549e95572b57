// Elements are built, never written as HTML: no text can become markup.

/** An element. Attributes: `on` is an object of listeners, `class` the class, false and null are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** An element of a drawing. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A symbol of icons.svg. */
export function icon(name) {
  const address = new URL("icons.svg", import.meta.url).pathname;
  return svg("svg", { "aria-hidden": "true" }, svg("use", { href: `${address}#${name}` }));
}

/** A button with a symbol, and words that are read out and shown as a tip. */
export function iconButton(name, label, listener) {
  return h("button", { type: "button", class: "quiet", "aria-label": label, title: label, on: { click: listener } }, icon(name));
}

/** Show these rows in `list`. The focus stays at the same control of the row with the same data-key. */
export function replaceRows(list, rows) {
  const controls = (row) => [...row.querySelectorAll("button, input, textarea, a")];
  const focused = list.contains(document.activeElement) ? document.activeElement : null;
  const before = focused?.closest("[data-key]");
  const at = before ? controls(before).indexOf(focused) : -1;
  list.replaceChildren(...rows);
  const after = at === -1 ? null : rows.find((row) => row.dataset.key === before.dataset.key);
  if (after) controls(after)[at]?.focus({ preventScroll: true });
}

/** A button that copies what `text()` gives, and says that it did. */
export function copyButton(label, text, words = "") {
  const button = iconButton("copy", label, async () => {
    try {
      await copy(text());
    } catch {
      return; // a browser may refuse; the text can still be selected
    }
    button.firstChild.replaceWith(icon("done"));
    setTimeout(() => button.firstChild.replaceWith(icon("copy")), 1500);
  });
  button.append(words);
  return button;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const focused = document.activeElement;
  const area = h("textarea", { class: "unseen" }); // without https there is only the old way
  area.value = text;
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  focused.focus();
  if (!isDone) throw new Error("The browser does not copy.");
  return undefined;
}

/** 1234567 -> "1,234,567". */
export function whole(number) {
  return Math.round(number).toLocaleString("en");
}
