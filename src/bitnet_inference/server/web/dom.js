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

/** A button that copies what `text()` gives, and says that it did. */
export function copyButton(label, text, words = "") {
  const button = iconButton("copy", label, async () => {
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      return; // without https a browser may refuse; the text can still be selected
    }
    button.firstChild.replaceWith(icon("done"));
    setTimeout(() => button.firstChild.replaceWith(icon("copy")), 1500);
  });
  button.append(words);
  return button;
}

/** 1234567 -> "1,234,567". */
export function whole(number) {
  return Math.round(number).toLocaleString("en");
}
