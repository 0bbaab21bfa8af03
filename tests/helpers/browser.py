"""Pages in a real browser, without a window: what they looked like to a reader, and what went
wrong."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSERS = (
    "chromium",
    "chromium-headless-shell",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser is installed: none of {', '.join(BROWSERS)}"
)

# In a page in front of everything else: what it says went wrong
WATCH = """<script>
var wrong = []; // also for the page around a frame
addEventListener("error", event =>
  wrong.push(event.message || `not loaded: ${event.target.src}`), true);
addEventListener("unhandledrejection", event => wrong.push(String(event.reason)));
addEventListener("securitypolicyviolation", event =>
  wrong.push(`${event.violatedDirective} ${event.blockedURI}`));
for (const name of ["error", "warn"]) console[name] = (...said) => wrong.push(said.join(" "));
</script>"""
# At its end: the steps, one after the other, and after each what is wider than the page
VISIT = """<script>
(async () => {
  const found = [];
  if (typeof ready !== "undefined") await ready;
  for (const step of STEPS) {
    const value = await step();
    await new Promise(done => setTimeout(done, 600));
    found.push({value, width: innerWidth,
      overflow: document.documentElement.scrollWidth - innerWidth,
      language: document.documentElement.lang, address: location.hash,
      text: document.body.innerText});
  }
  parent.postMessage(JSON.stringify({found, wrong}), "*");
})();
</script>"""
# Around it: a browser's window has a least width, a frame in it has none
FRAME = """<!DOCTYPE html><script>
addEventListener("message", event => document.body.dataset.report = event.data)</script>
<body><iframe src="page.html{address}" width="{width}" height="{height}"
style="border: 0"></iframe></body>"""


def visit(
    page: str, folder: Path, steps: list[str], *, width: int, height: int = 800, address: str = ""
) -> list[dict]:
    """Opens the page, `width` pixels wide, and takes the steps, JavaScript functions.

    Returns:
        After each step its `value`, the page's `text`, `language` and `address`.

    Raises:
        AssertionError: the page reported an error or a warning, or was wider than the window.
    """
    script = VISIT.replace("STEPS", f"[{', '.join(steps)}]")
    page = page.replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"{script}</body>")
    (folder / "page.html").write_text(page, encoding="utf-8")
    (folder / "frame.html").write_text(
        FRAME.format(address=html.escape(address), width=width, height=height), encoding="utf-8"
    )
    report = report_of((folder / "frame.html").as_uri(), folder)
    assert not report["wrong"], report["wrong"]
    for step, found in zip(steps, report["found"], strict=True):
        assert found["width"] == width and found["overflow"] <= 0, (
            step,
            found["width"],
            found["overflow"],
        )
    return report["found"]


def report_of(address: str, folder: Path, seconds: int = 120):
    """What a page leaves in `document.body.dataset.report`, as JSON; the browser keeps its files in
    `folder`."""
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'browser'}",
    ]
    command += [
        f"--virtual-time-budget={500 * seconds}",
        "--window-size=1400,900",
        "--dump-dom",
        address,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    report = re.search(r' data-report="([^"]*)"', done.stdout)
    assert report, f"the page did not get to its end: {done.stderr[-2000:]}"
    return json.loads(html.unescape(report[1]))
