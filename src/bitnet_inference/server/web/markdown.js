// Markdown as elements. What a model writes is hostile: no HTML is made of it, nothing is loaded because of it, links go to
// http and https only, and what is not understood stays text. Every search ends after MAX_SPAN characters, so that no
// text takes longer than its length deserves.

import { copyButton, h } from "./dom.js";

const MAX_DEPTH = 8;
const MAX_SPAN = 4000;
const MAX_EMPHASIS = 1000;
const FENCE = /^( {0,3})(`{3,}(?![^`]*`)|~{3,})\s*([^\s`]*)/;
const NESTED_FENCE = /^([\s>]*)(?:(?:[-*+]|\d{1,9}[.)])\s+)?(`{3,}(?![^`]*`)|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

/** Show `text` in `element`. Called again with a longer text, it leaves the blocks that are still the same alone. */
export function show(element, text) {
  const sources = split(spaced(text.replaceAll("\r\n", "\n").split("\n")));
  const before = element.markdownSources ?? [];
  let same = 0;
  while (same < sources.length && same < before.length && before[same] === sources[same].key) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const source of sources.slice(same)) {
    const block = build(source, 0);
    block.dir ||= "auto"; // a language that is written from right to left
    element.append(block);
  }
  element.markdownSources = sources.map((source) => source.key);
}

// Indents are counted in spaces, so tabs become spaces; but those of fenced code belong to it. It ends with the list or
// the quote that it stands in.
function spaced(lines) {
  const widen = (text) => text.replaceAll("\t", "    ");
  let lead = "", mark = "", isInList = false;
  return lines.map((line) => {
    const isQuoted = lead.includes(">");
    if (mark && line.trim() && (isQuoted ? !/^\s*>/.test(line) : isInList && !/^\s/.test(line))) mark = "";
    if (mark && !closes(isQuoted ? line.replace(/^[\s>]+/, "") : line, mark))
      return line.startsWith(lead) ? widen(lead) + line.slice(lead.length) : line;
    if (!mark && /^\S/.test(line)) isInList = ITEM.test(line);
    [, lead, mark] = (!mark && NESTED_FENCE.exec(line)) || ["", "", ""];
    return widen(line);
  });
}

function closes(line, mark) {
  return line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
}

// A block: {kind, lines, key, ...}
function split(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const block = blockAt(lines, at);
    block.key = `${block.kind}\n${lines.slice(at, block.end).join("\n")}`;
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at];
  let match = FENCE.exec(line);
  if (match) return fenced(lines, at, match);
  match = HEADING.exec(line);
  if (match) return { kind: "heading", level: match[1].length, text: match[2], end: at + 1 };
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (QUOTE.test(line)) return quoted(lines, at);
  if (ITEM.test(line)) return listed(lines, at);
  if (startsTable(lines, at)) return tabled(lines, at);
  let end = at + 1;
  while (end < lines.length && !endsParagraph(lines, end)) end++;
  return { kind: "paragraph", text: lines.slice(at, end).join("\n"), end };
}

function endsParagraph(lines, at) {
  const line = lines[at];
  const item = ITEM.exec(line);
  // A number that begins a line of prose is no list, unless it is 1.
  const startsList = item && item[4] && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1);
  return !line.trim() || FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line) || startsList || startsTable(lines, at);
}

function fenced(lines, at, match) {
  const [, indent, mark, language] = match;
  const lead = new RegExp(`^ {0,${indent.length}}`);
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], mark)) end++;
  const text = lines.slice(at + 1, end).map((line) => line.replace(lead, "")).join("\n");
  return { kind: "code", language: language.slice(0, 30), text, end: Math.min(end + 1, lines.length) };
}

function quoted(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  return { kind: "quote", lines: lines.slice(at, end).map((line) => line.replace(QUOTE, "")), end };
}

function listed(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const items = [];
  let end = at, width = 0;
  for (; end < lines.length; end++) {
    const line = lines[end], item = ITEM.exec(line);
    const lead = line.length - line.trimStart().length;
    if (item && item[1].length < indent.length + 2 && item[1].length >= indent.length && !RULE.test(line)) {
      if (/\d/.test(item[2]) !== isOrdered) break;
      width = item[1].length + item[2].length + Math.min(item[3].length || 1, 4);
      items.push([item[4]]);
    } else if (!line.trim()) {
      let next = end + 1;
      while (next < lines.length && !lines[next].trim()) next++;
      const below = lines[next] ?? "";
      if (!ITEM.test(below) && below.length - below.trimStart().length < indent.length + 2) break;
      for (; end < next - 1; end++) items.at(-1).push("");
      items.at(-1).push("");
    } else if (lead >= indent.length + 2) {
      items.at(-1).push(line.slice(Math.min(lead, width)));
    } else if (items.at(-1).at(-1) && !endsParagraph(lines, end)) {
      items.at(-1).push(line); // a paragraph goes on without an indent
    } else break;
  }
  return { kind: "list", isOrdered, start: parseInt(mark, 10), items, end };
}

function startsTable(lines, at) {
  const below = lines[at + 1];
  return lines[at].includes("|") && below !== undefined && below.includes("-") && below.length < MAX_SPAN
    && TABLE_RULE.test(below) && cells(lines[at]).length === cells(below).length;
}

function tabled(lines, at) {
  const sides = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "to-center" : "to-right") : null));
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end++;
  return { kind: "table", sides, head: cells(lines[at]), rows: lines.slice(at + 2, end).map(cells), end };
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function build(block, depth) {
  switch (block.kind) {
    case "heading":
      return h(`h${Math.min(6, block.level + 2)}`, {}, ...inline(block.text)); // the page has h1, a message h2
    case "rule":
      return h("hr");
    case "code":
      return codeBlock(block);
    case "quote":
      return h("blockquote", {}, ...nested(block.lines, depth));
    case "list": {
      const items = block.items.map((lines) => h("li", {}, ...itemContent(lines, depth)));
      const start = block.isOrdered && block.start !== 1 ? block.start : null;
      return h(block.isOrdered ? "ol" : "ul", { start }, ...items);
    }
    case "table":
      return table(block);
    default:
      return h("p", {}, ...inline(block.text));
  }
}

function nested(lines, depth) {
  if (depth >= MAX_DEPTH) return [lines.join("\n")];
  return split(lines).map((block) => build(block, depth + 1));
}

function itemContent(lines, depth) {
  const isLoose = lines.join("\n").trimEnd().includes("\n\n");
  const nodes = nested(lines, depth);
  const [first] = nodes;
  return first?.tagName === "P" && !isLoose ? [...first.childNodes, ...nodes.slice(1)] : nodes;
}

function codeBlock(block) {
  const code = h("code", {}, block.text);
  const copy = copyButton("Copy the code", () => code.textContent, "Copy");
  const pre = h("pre", { tabindex: "0" }, code);
  return h("div", { class: "code", dir: "ltr" }, h("header", {}, h("span", {}, block.language || "text"), copy), pre);
}

function table(block) {
  const row = (tag, values) =>
    h("tr", {}, ...block.sides.map((side, at) => h(tag, { class: side }, ...inline(values[at] ?? ""))));
  const head = h("thead", {}, row("th", block.head));
  const body = h("tbody", {}, ...block.rows.map((values) => row("td", values)));
  return h("div", { class: "scroll", tabindex: "0" }, h("table", {}, head, body));
}

// What can begin something within a line.
const SPECIAL = /(?:(?<! ) {2,}|\\)\n|\\[!-/:-@[-`{-~]|`+|!?\[|\*{1,3}|_{1,3}|~~|<?https?:\/\//g;

/** The nodes of a text within a block. */
export function inline(text, depth = 0) {
  if (depth >= MAX_DEPTH) return [text];
  const nodes = [];
  let plain = "", at = 0;
  const flush = () => {
    if (plain) nodes.push(plain);
    plain = "";
  };
  const special = new RegExp(SPECIAL);
  for (let match; (match = special.exec(text)); ) {
    plain += text.slice(at, match.index);
    const found = spanAt(text, match.index, match[0], depth);
    if (found.node) {
      flush();
      nodes.push(found.node);
    } else plain += found.text;
    at = special.lastIndex = found.end;
  }
  plain += text.slice(at);
  flush();
  return nodes;
}

function spanAt(text, at, mark, depth) {
  const after = at + mark.length;
  if (mark.endsWith("\n")) return { node: h("br"), end: after };
  if (mark[0] === "\\") return { text: mark[1], end: after };
  if (mark[0] === "`") return codeSpan(text, at, mark) ?? { text: mark, end: after };
  if (mark.endsWith("[")) return linkSpan(text, at, after, depth) ?? { text: mark, end: after };
  if (mark.endsWith("://")) return bareLink(text, at, mark) ?? { text: mark, end: after };
  return emphasis(text, at, mark, depth) ?? { text: mark, end: after };
}

function codeSpan(text, at, mark) {
  const span = text.slice(at + mark.length, at + MAX_SPAN);
  for (const match of span.matchAll(/`+/g)) {
    if (match[0].length !== mark.length) continue;
    const inner = span.slice(0, match.index).replaceAll("\n", " ");
    const code = /^ .*[^ ].* $/.test(inner) ? inner.slice(1, -1) : inner;
    return { node: h("code", {}, code), end: at + mark.length + match.index + match[0].length };
  }
  return null;
}

const LINK = /^((?:[^[\]\\]|\\.){0,1000})\]\(\s*<?([^\s<>()]{1,2000}(?:\([^\s()]{0,200}\)[^\s<>()]{0,500})?)>?(?:\s+"[^"]{0,300}")?\s*\)/;

function linkSpan(text, at, after, depth) {
  const match = LINK.exec(text.slice(after, after + MAX_SPAN));
  if (!match) return null;
  const node = link(match[2], inline(match[1] || match[2], depth + 1)); // an image becomes a link to it
  return node && { node, end: after + match[0].length };
}

function bareLink(text, at, mark) {
  const start = mark[0] === "<" ? at + 1 : at;
  let [address] = /^[^\s<>"`]*/.exec(text.slice(start, start + 2000));
  if (mark[0] !== "<") {
    // What ends the sentence, or closes what was opened before the link, is none of it.
    let numClosing = address.split(")").length - address.split("(").length;
    for (let last; (last = address.at(-1)); address = address.slice(0, -1)) {
      if (last === ")" && numClosing > 0) numClosing--;
      else if (!".,:;!?'*_~".includes(last)) break;
    }
  }
  const node = link(address, [address]);
  const closing = mark[0] === "<" && text[start + address.length] === ">" ? 1 : 0;
  return node && { node, end: start + address.length + closing };
}

function link(address, content) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (url.protocol !== "https:" && url.protocol !== "http:") return null;
  // A link inside a link is no link: its words alone are kept.
  const words = content.map((node) => (node instanceof Element && (node.matches("a") || node.querySelector("a")) ? node.textContent : node));
  return h("a", { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank", title: url.href }, ...words);
}

const WORD = /[\p{L}\p{N}]/u;

function emphasis(text, at, mark, depth) {
  const letter = mark[0], size = mark.length, after = at + size;
  if (!text[after] || /\s/.test(text[after]) || text[after] === letter) return null;
  if (letter === "_" && WORD.test(text[at - 1] ?? " ")) return null;
  const runs = letter === "*" ? /\*+/g : letter === "_" ? /_+/g : /~~/g;
  const inner = []; // the sizes of what has been opened in between
  for (const { 0: run, index } of text.slice(after, after + MAX_EMPHASIS).matchAll(runs)) {
    const before = text[after + index - 1], behind = text[after + index + run.length] ?? " ";
    if (index === 0 || before === "\\") continue;
    const canClose = !/\s/.test(before) && !(letter === "_" && WORD.test(behind));
    const canOpen = !/\s/.test(behind) && !(letter === "_" && WORD.test(before));
    let used = 0;
    if (canClose) {
      const closesHere = run.length === size && !inner.includes(size);
      while (!closesHere && inner.length && run.length - used >= inner.at(-1)) used += inner.pop();
      if (closesHere || (!inner.length && run.length - used >= size)) {
        const end = after + index + used;
        return wrap(mark, text.slice(after, end), end + size, depth);
      }
    }
    if (canOpen && run.length > used) inner.push(run.length - used);
  }
  return null;
}

function wrap(mark, inner, end, depth) {
  const children = inline(inner, depth + 1);
  if (mark === "~~") return { node: h("del", {}, ...children), end };
  if (mark.length === 3) return { node: h("em", {}, h("strong", {}, ...children)), end };
  return { node: h(mark.length === 2 ? "strong" : "em", {}, ...children), end };
}
