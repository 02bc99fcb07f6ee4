"""Report pages of hostile names and texts in headless Chromium: no script runs, nothing is loaded, nothing is a link.

The runs are measured ones, in which every text that comes from outside (names of models and texts, what a session was
started with, reasons of failed rows, tokens of examples) is replaced by a payload.
"""

import csv
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attack.harness import Command, Finding, Stage, judge

BROKEN = "window.broken=1"
PAYLOADS: dict[str, str] = {
    "script": f"<script>{BROKEN}</script>",
    "end of a script": f"</script><script>{BROKEN}</script>",
    "comment in a script": f"<!--<script>{BROKEN}//",
    "image": f"<img src=x onerror={BROKEN}>",
    "drawing": f"<svg onload={BROKEN}><script>{BROKEN}</script></svg>",
    "end of an attribute": f'" onmouseover="{BROKEN}" autofocus onfocus="{BROKEN}',
    "end of an attribute, single": f"' onmouseover='{BROKEN}' x='",
    "link": f'<a href="javascript:{BROKEN}">press</a>',
    "link of plotly": f'<a href="javascript:{BROKEN}" target="_top">press</a><br><b>bold</b>',
    "data link": f'<a href="data:text/html,<script>{BROKEN}</script>">press</a>',
    "frame": '"><iframe src="https://example.com/"></iframe>',
    "object": '<object data="https://example.com/x.swf"></object><embed src="https://example.com/x">',
    "base": '<base href="https://example.com/">',
    "refresh": '<meta http-equiv="refresh" content="0;url=https://example.com/">',
    "style": "</style><style>@import url(https://example.com/x.css);body{display:none}</style>",
    "title": f"</title></textarea><script>{BROKEN}</script>",
    "form": '<form action="https://example.com/"><button>press</button></form>',
    "template": "{{ 7 * 7 }}{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "formula": "=cmd|' /C calc'!A0",
    "formula with plus": "+1+cmd|' /C calc'!A0",
    "formula with at": "@SUM(1+1)*cmd|' /C calc'!A0",
    "formula with minus": "-2+3+cmd|' /C calc'!A0",
    "formula after a tab": "\t=1+1",
    "line ends": "a\r\n=1+1,b\n| x | y |\n# title",
    "separators of lines": "a\u2028b\u2029c\u0085d",
    "markdown": f"[press](javascript:{BROKEN}) ![x](https://example.com/x.png) `code` | cell | **bold** <b>x</b>",
    "mathematics": "$\\frac$ a_$^$b $\\input{/etc/passwd}$",
    "right to left": "\u202egnp.exe\u202c",
    "escape": "\x1b]0;owned\x07\x1b[2J\x9b31m",
    "null": "a\\u0000b\x00c",
    "lone surrogate": "\ud800",
    "long": "x" * 20_000,
    "markup": "[/x][bold]y[link=https://example.com]z[/link]",
    "polyglot": f"jaVasCript:/*-/*`/*\\`/*'/*\"/**/(/* */{BROKEN} )//%0D%0A</stYle/</titLe/</teXtarEa/</scRipt/"
    f"--!>\\x3csVg/<sVg/oNloAd={BROKEN}//>\\x3e",
    "path": "../../../etc/passwd",
    "prototype": "__proto__",
    "constructor": "constructor",
    "number": "NaN",
    "empty": "",
}
RUNS = ("curve", "recall", "perplexity", "compare", "own")


@dataclass(frozen=True)
class Hostile:
    made: str  # one of RUNS, or "all": of every kind on one page
    payload: str

    @property
    def name(self) -> str:
        return f"{self.made}: {self.payload}"


def all_pages() -> Iterator[Hostile]:
    for made in (*RUNS, "all"):
        for payload in PAYLOADS:
            yield Hostile(made, payload)


def poison(folder: Path, payload: str) -> None:
    """Replaces what comes from outside in a run, consistently."""
    # a name that is empty or the same for all cannot tell two things from each other
    names = {"models/llama": payload, "text.txt": payload + "2", "docs": payload + "3", "farspan": payload}

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return names.get(value, value)
        if isinstance(value, list):
            return [walk(one) for one in value]
        if isinstance(value, dict):
            return {names.get(key, key): walk(one) for key, one in value.items()}
        return value

    header = walk(json.loads((folder / "run.json").read_text()))
    for session in header["sessions"]:
        session |= {"command": [payload, "--x", payload], "platform": payload, "processor": payload, "git": payload}
        session["packages"] = {payload: payload, "torch": payload}
        session["accelerators"] = [payload]
    (folder / "run.json").write_text(json.dumps(header))
    rows = [walk(json.loads(line)) for line in (folder / "rows.jsonl").read_text().splitlines()]
    rows[-1] |= {"status": "oom", "scores": {}, "reason": payload}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if (folder / "examples.jsonl").exists():
        lines = [walk(json.loads(line)) for line in (folder / "examples.jsonl").read_text().splitlines()]
        for line in lines:
            line["what"] = line["what"].replace("text.txt", payload + "2")
            line["parts"] = [[kind, [payload, *tokens]] for kind, tokens in line["parts"]]
        (folder / "examples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


LOOK = """
const all = [...document.querySelectorAll('*')], bad = [];
for (const it of all) {
  for (const one of it.attributes) {
    if (/^on/i.test(one.name)) bad.push('attribute ' + one.name);
    const own = it.hasAttribute('download') ? /^data:text.csv;/ : /^(#|data:image|blob:)/;  // a figure's numbers
    if (/^(href|src|action|data|formaction|xlink:href)$/i.test(one.name) && !own.test(one.value))
      bad.push(it.tagName + ' ' + one.name + '=' + one.value.slice(0, 80));
  }
  if (/^(iframe|object|embed|base|form|applet)$/i.test(it.tagName)) bad.push('element ' + it.tagName);
  if (it.tagName === 'META' && /refresh/i.test(it.httpEquiv)) bad.push('refresh');
}
return {bad, broken: window.broken, drawn: document.documentElement.dataset.drawn,
        hidden: getComputedStyle(document.body).display === 'none'};
"""


# the page itself may hold these; the last two are Chromium's new tab, which may still be loading
OWN = ("data:", "blob:", "chrome:", "chrome-untrusted:")


def attack(stage: Stage, one: Hostile, browser: Any) -> list[Finding]:
    """Reports a poisoned run, opens the page, and looks at it."""
    with stage.copy() as here:
        runs = []
        for made in RUNS if one.made == "all" else (one.made,):
            shutil.copytree(stage.made(made) / "run", here / f"run-{made}")
            poison(here / f"run-{made}", PAYLOADS[one.payload])
            runs.append(f"run-{made}")
        (end,) = stage.zygote.run(Command(("report", *runs), here))
        if end.code == 2:
            return judge(end, expect="any", names=("run",))  # refused in words: it shows nothing
        found = judge(end, expect="ok")
        if end.code:
            return found
        found += tables(here / "report")
        if browser is not None:
            found += opened(browser, here / "report" / "report.html")
        return found


def opened(browser: Any, page: Path) -> list[Finding]:
    """What a browser makes of a page."""
    from selenium.common.exceptions import TimeoutException, UnexpectedAlertPresentException, WebDriverException
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get_log("browser"), browser.get_log("performance")
    try:
        browser.get(page.resolve().as_uri())
        WebDriverWait(browser, 30, 0.05).until(
            lambda it: it.execute_script("return document.documentElement.dataset.drawn")
        )
        seen = browser.execute_script(LOOK)
    except TimeoutException:
        return [Finding("page", f"the figures were never drawn: {browser.get_log('browser')[:3]}")]
    except UnexpectedAlertPresentException as error:
        return [Finding("executed", f"an alert: {error}")]
    except WebDriverException as error:
        return [Finding("page", f"Chromium: {error.msg}")]
    found = [Finding("executed", "a script of the payload ran")] if seen["broken"] else []
    found += [Finding("page", one) for one in seen["bad"][:5]]
    if seen["hidden"]:
        found.append(Finding("page", "a style of the payload hides the page"))
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    asked = [url for url in asked if not url.startswith(OWN) and url != page.resolve().as_uri()]
    if asked:
        found.append(Finding("page", f"asks for {asked[:3]}"))
    return found


MARKDOWN_HTML = re.compile(r"(?<!\\)<\s*/?\s*(script|img|svg|a|iframe|style|base|meta|form|object|embed)\b", re.I)
MARKDOWN_LINK = re.compile(r"(?<!\\)\[[^\]]*(?<!\\)\]\(\s*(javascript|https?|data):", re.IGNORECASE)


def tables(folder: Path) -> list[Finding]:
    """What a spreadsheet or a viewer of Markdown would run of the tables."""
    found = []
    for file in sorted([*folder.glob("*.csv"), folder / "report.md"]):
        if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", file.read_text("utf-8")):
            found.append(Finding("table", f"{file.name}: control characters"))
    for file in sorted(folder.glob("*.csv")):
        for line in csv.reader(file.read_text("utf-8").splitlines()):
            for cell in line:
                if cell.startswith(tuple("=+@\t\r")) or (cell.startswith("-") and not _number(cell)):
                    found.append(Finding("table", f"{file.name}: a formula: {cell[:60]!r}"))
    text = (folder / "report.md").read_text("utf-8")
    for what, pattern in (("HTML", MARKDOWN_HTML), ("a link", MARKDOWN_LINK)):
        match = pattern.search(re.sub(r"`[^`\n]*`", "", text))
        if match:
            found.append(Finding("table", f"report.md: {what}: {text[match.start() : match.start() + 60]!r}"))
    return found[:5]


def _number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
