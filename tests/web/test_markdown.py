"""What Markdown becomes on the page to chat on."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import Page
from talking import ask, finished

pytest_plugins = ["browsing"]


HOSTILE = """<img src=x onerror="window.hacked = 1"> <script>window.hacked = 2</script>

[click](javascript:window.hacked=3) [click](data:text/html,x) ![picture](https://example.com/x.png) <javascript:hacked>

| <b>a</b> | b |
|---|---|
| <iframe src="//example.com"> | `<svg onload=hacked=4>` |

```<b>html"onx=
</code></pre><img src=x onerror="window.hacked = 5">
```

<https://example.com/"onmouseover="hacked=6"> [a](https://example.com/"onclick="hacked=7)"""


def test_hostile_text_stays_text(page: Page, answer_with: Callable[[str], None]) -> None:
    answer_with(HOSTILE)
    ask(page, HOSTILE)
    finished(page)
    assert page.locator(".user .text").text_content() == HOSTILE
    assert page.locator("#log :is(img, script, iframe, object, embed, style, b)").count() == 0
    assert "<img src=x onerror" in page.locator(".assistant .text").inner_text()
    links = page.locator("#log a")
    for link in links.all():
        link.dispatch_event("mouseover")
        assert (link.get_attribute("href") or "").startswith("https://example.com/")
        assert "noopener" in (link.get_attribute("rel") or "")
    attributes = page.evaluate("[...document.querySelectorAll('#log .text *')].flatMap((e) => e.getAttributeNames())")
    assert links.count() >= 2 and not [name for name in attributes if name.startswith("on")]
    assert page.evaluate("window.hacked") is None


RENDER = """async ([text, steps]) => {
    const {show} = await import(document.querySelector("script[type=module]").src.replace("chat.js", "markdown.js"));
    const element = document.createElement("div");
    for (let at = 1; steps && at < text.length; at++) show(element, text.slice(0, at));
    show(element, text);
    for (const each of element.querySelectorAll("button, a")) each.removeAttribute("title");
    return element.innerHTML.replaceAll(/ (rel|target|tabindex|class|dir)="[^"]*"/g, "");
}"""
MARKDOWN = {
    "plain": ("a < b & c\nd", "<p>a &lt; b &amp; c\nd</p>"),
    "headings": ("# A\n## B *c* ##\n####### d", "<h3>A</h3><h4>B <em>c</em></h4><p>####### d</p>"),
    "emphasis": ("**a *b* c** ~~d~~", "<p><strong>a <em>b</em> c</strong> <del>d</del></p>"),
    "both": ("***e***", "<p><em><strong>e</strong></em></p>"),
    "nested": ("*a **b***", "<p><em>a <strong>b</strong></em></p>"),
    "no emphasis": ("2 * 3 * 4 snake_case_name a* b ** c", "<p>2 * 3 * 4 snake_case_name a* b ** c</p>"),
    "escapes": (r"\*a\* \# \\ \[b](c)", r"<p>*a* # \ [b](c)</p>"),
    "code": ("`a *b*` ``c ` d``", "<p><code>a *b*</code> <code>c ` d</code></p>"),
    "breaks": ("a  \nb\\\nc", "<p>a<br>b<br>c</p>"),
    "rule": ("a\n\n---\n***", "<p>a</p><hr><hr>"),
    "quote": ("> a\n> - b\n\nc", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>"),
    "list": ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
    "ordered": ("3. a\n4. b\n\n   c", '<ol start="3"><li>a</li><li><p>b</p><p>c</p></li></ol>'),
    "year": ("It was\n1984. Yes", "<p>It was\n1984. Yes</p>"),
    "table": (
        "| a | b |\n|:--|--:|\n| 1 | *2* |\n| x \\| y |\n\nz",
        "<div><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td><em>2</em></td></tr>"
        "<tr><td>x | y</td><td></td></tr></tbody></table></div><p>z</p>",
    ),
    "no table": ("a | b\nc", "<p>a | b\nc</p>"),
    "links": (
        "[a *b*](https://x.org/a_(b)) https://y.org/c_d. <http://z.org>",
        '<p><a href="https://x.org/a_(b)">a <em>b</em></a> <a href="https://y.org/c_d">https://y.org/c_d</a>. '
        '<a href="http://z.org/">http://z.org</a></p>',
    ),
    "a link in brackets": (
        "(see https://x.org/a_(b)). (https://x.org.)",
        '<p>(see <a href="https://x.org/a_(b)">https://x.org/a_(b)</a>). (<a href="https://x.org/">https://x.org</a>.)</p>',
    ),
    "no links": ("[a](ftp://x) [b](/c) [d] (https:/e)", "<p>[a](ftp://x) [b](/c) [d] (https:/e)</p>"),
}  # fmt: skip


def test_markdown(page: Page) -> None:
    found = {name: page.evaluate(RENDER, [text, False]) for name, (text, _) in MARKDOWN.items()}
    assert found == {name: html for name, (_, html) in MARKDOWN.items()}


CODE = {
    "tabs": ("```make\nall:\n\tgcc x.c\n```", "all:\n\tgcc x.c"),
    "two empty lines in a list": ("1. a\n\n   ```py\n   b\n\n\n   c\n   ```\n2. d", "b\n\n\nc"),
    "tabs in a list": ("1. a\n\n\t```\n\tb\n\t\tc\n\t```", "b\n\tc"),
    "an indent": ("  ```\n  a\n    b\n c\n  ```", "a\n  b\nc"),
    "a fence in a line": ("```pip install --upgrade x```", "pip install --upgrade x"),
}


def test_code_is_what_was_written(page: Page) -> None:
    html = {name: page.evaluate(RENDER, [text, False]) for name, (text, _) in CODE.items()}
    found = {name: re.findall("<code>(.*?)</code>", each, re.DOTALL) for name, each in html.items()}
    assert found == {name: [code] for name, (_, code) in CODE.items()}


def test_code_ends_with_the_list_or_the_quote_that_it_stands_in(page: Page) -> None:
    for begin in ("- x\n  ```\n  code", "> ```\n> code", "1. x\n\n   ```\n   code", "```\n> ```\n```"):
        html = page.evaluate(RENDER, [begin + "\n\nText\n\n- a\n\t- b", False])
        assert "<ul><li>a<ul><li>b</li></ul></li></ul>" in html, begin


def test_code_has_its_words_and_a_button_that_copies(page: Page, answer_with: Callable[[str], None]) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer_with("Look:\n```python\nif a < b:\n    # *not* emphasis\n```\nand ~~~\n~~~\n```\nnot closed")
    ask(page, "Code?")
    finished(page)
    page.get_by_role("button", name="Copy the code").first.click()
    assert page.locator(".code header span").all_inner_texts() == ["python", "text"]
    assert page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    # *not* emphasis"


def test_piece_by_piece_it_becomes_the_same(page: Page) -> None:
    text = "\n\n".join(text for text, _ in MARKDOWN.values()) + "\n```js\nlet a;\n```\n" + HOSTILE
    assert page.evaluate(RENDER, [text, True]) == page.evaluate(RENDER, [text, False])


UNITS = (
    "*a ", "[", "**a _b ", "`a", "> ", "- a\n ", "|", "![a](", "_", "a|b\n-|-\n", "<http://", "  - ", "`",
    "- a\n\n\n", "https://x)", "- a" + "\n" * 200_000 + "- b",
)  # fmt: skip


def test_no_text_takes_long(page: Page) -> None:
    for unit in UNITS:
        assert page.evaluate(RENDER, [unit * max(1, 30_000 // len(unit)), False]), unit
