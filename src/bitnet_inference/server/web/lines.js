// A chart of lines over the last minutes.

import { h, svg } from "./dom.js";

const WIDTH = 300, HEIGHT = 100;
const NEAR = 2; // seconds: nothing is told of moments that nobody has looked at

export class Lines {
  /**
   * `series` are names of one or two lines; `format(value)` gives [number, unit] as text. `least`: the scale ends there or
   * higher. `room`: how many seconds are shown.
   */
  constructor(title, { series = [], format, least = 1, room = 300, note = "" }) {
    Object.assign(this, { title, format, least, room, rows: [], pointer: null });
    const count = Math.max(1, series.length);
    const kinds = ["first", "second"].slice(0, count);
    this.unders = kinds.map((kind) => svg("path", { class: `under ${kind}` }));
    this.lines = kinds.map((kind) => svg("path", { class: `line ${kind}` }));
    this.at = svg("line", { class: "at", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const grid = [0, 50, 100].map((y) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title },
      ...grid, ...this.unders, ...this.lines, this.at);
    this.value = h("p", { class: "value" }, "–");
    this.most = h("span", { class: "most" });
    this.plot = h("div", { class: "plot" }, this.picture, this.most);
    this.legend = h("span", {}, ...series.map((name, at) => h("span", { class: at ? "key-line second" : "key-line" }, name)));
    if (!series.length) this.legend.append(note);
    this.when = h("span", {}, "last 5 minutes");
    this.element = h("figure", { class: "chart" }, h("h3", {}, title), this.value, this.plot, h("footer", {}, this.legend, this.when));
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.point(null));
  }

  /** One moment more: a value for each line, null where there is none. */
  add(time, values) {
    this.rows = this.rows.filter((row) => row.time < time && time - row.time < this.room);
    this.rows.push({ time, values });
    this.draw();
  }

  draw() {
    const most = scale(Math.max(this.least, ...this.rows.flatMap((row) => row.values.map((value) => value ?? 0))));
    this.most.textContent = this.format(most).join(" ");
    this.lines.forEach((line, at) => {
      const points = this.rows.map((row) => [this.x(row), row.values[at] === null ? null : HEIGHT * (1 - row.values[at] / most)]);
      line.setAttribute("d", path(points));
      this.unders[at].setAttribute("d", under(points));
    });
    this.point(this.pointer);
  }

  x(row) {
    return WIDTH * (1 - (this.rows.at(-1).time - row.time) / this.room);
  }

  tell(row) {
    const known = row.values.map((value) => (value === null ? ["–", ""] : this.format(value)));
    const [number, unit] = known[0];
    const others = known.slice(1).map((each) => ` + ${each[0]}`);
    this.value.replaceChildren(number + others.join(""), h("small", {}, unit));
    this.picture.setAttribute("aria-label", `${this.title}: ${number} ${unit}`);
  }

  /** Tell the moment under the pointer, also when the next ones come; null: the last one. */
  point(event) {
    this.pointer = event;
    if (!this.rows.length) return;
    const row = event && this.rowAt(event.clientX);
    this.at.setAttribute("visibility", row ? "visible" : "hidden");
    if (row) for (const end of ["x1", "x2"]) this.at.setAttribute(end, this.x(row));
    this.when.textContent = row ? new Date(row.time * 1000).toLocaleTimeString() : "last 5 minutes";
    this.tell(row ?? this.rows.at(-1));
  }

  rowAt(place) {
    const box = this.picture.getBoundingClientRect();
    const time = this.rows.at(-1).time - ((box.right - place) / box.width) * this.room;
    const distance = (row) => Math.abs(row.time - time);
    const nearest = this.rows.reduce((best, row) => (distance(row) < distance(best) ? row : best));
    return distance(nearest) < NEAR ? nearest : null;
  }
}

function path(points) {
  let isDown = false;
  return points.map(([x, y]) => {
    const step = y === null ? "" : `${isDown ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`;
    isDown = y !== null;
    return step;
  }).join("");
}

function under(points) {
  const known = points.map(([x, y]) => [x, y ?? HEIGHT]);
  if (known.length < 2) return "";
  return `M${known[0][0]} ${HEIGHT}L${known.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join("L")}L${known.at(-1)[0]} ${HEIGHT}Z`;
}

/** The next 1, 2 or 5 with zeros behind it. */
function scale(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((digit) => digit * power).find((each) => each >= value * 0.999);
}
