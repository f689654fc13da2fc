"""The page in a real browser: it draws, sorts and tells numbers, without an error on the console.

Needs Debian's package `chromium`; without it these tests are skipped.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from dflash_offline.train.report.page import comparison_page, run_page
from dflash_offline.train.report.run_folder import read_run
from dflash_offline.train.report.sweep_folder import read_comparison

CHROMIUM = shutil.which("chromium")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0")
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
PROBE = """<script>
const found = document.createElement("pre"), lines = [];
found.id = "found";
function tell() { found.textContent = lines.join("\\n"); document.body.append(found); }
const chart = document.querySelector("figure[data-key^=acceptance] svg.lines"), box = chart.getBoundingClientRect();
const at = { bubbles: true, clientX: box.left + 0.99 * box.width, clientY: box.top + box.height / 2 };
chart.dispatchEvent(new PointerEvent("pointermove", at));
lines.push("tip " + document.getElementById("tip").textContent);
chart.dispatchEvent(new PointerEvent("pointerleave"));
lines.push("hidden " + document.getElementById("tip").hidden);
const table = document.querySelector("table.sortable");
if (table) {
  const order = () => [...table.tBodies[0].rows].map(row => row.cells[1].textContent).join(",");
  const heads = [...table.tHead.rows[0].cells];
  const button = heads.find(head => head.textContent.startsWith("acceptance length")).querySelector("button");
  button.click(); lines.push("falling " + order());
  button.click(); lines.push("rising " + order());
  const folded = document.querySelector("details.run:not([open])");
  location.hash = folded.id;
  setTimeout(() => { lines.push("opened " + folded.open); tell(); }, 300);
} else { tell(); }
</script>"""

pytestmark = [
    pytest.mark.slow,  # a browser takes seconds to start
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"),
]


def opened(html: str, folder: Path) -> tuple[str, list[str]]:
    """The document once its scripts have run, and what the console said."""
    page, profile = folder / "page.html", folder / "profile"
    page.write_text(html)
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--window-size=1280,3000", "--virtual-time-budget=3000"]
    done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def probed(html: str, folder: Path) -> dict[str, str]:
    """What a reader with a pointer finds; the page's policy is taken away, which would forbid the probe."""
    dom, console = opened(POLICY.sub("", html).replace("</body>", f"{PROBE}</body>"), folder)
    assert console == []
    (text,) = re.findall(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    return dict(line.split(" ", 1) for line in text.splitlines())


def test_the_page_of_a_run(make_run, tmp_path):
    html = run_page(read_run(make_run(tmp_path / "run")))
    dom, console = opened(html, tmp_path)
    assert console == []
    assert len(re.findall(r'<path class="line ', dom)) >= 10
    assert 'id="tip"' in dom, "the script ran under the page's policy"
    found = probed(html, tmp_path)
    assert found["tip"].startswith("step 10answers from: target greedy2")
    assert found["hidden"] == "true"


def test_the_page_of_a_sweep(make_sweep, tmp_path):
    make_sweep(tmp_path / "sweep")
    html = comparison_page(read_comparison(tmp_path / "sweep"))
    dom, console = opened(html, tmp_path)
    assert console == []
    assert len(re.findall(r'<path class="line ', dom)) >= 16
    assert dom.count("<button>") >= 8, "the heads of the table can be clicked"
    found = probed(html, tmp_path)
    assert found["falling"] == "run 3,run 1,run 4,run 2,run 5,run 6"
    assert found["rising"] == "run 2,run 4,run 1,run 3,run 5,run 6"
    assert found["opened"] == "true"
    assert "run 3" in found["tip"]


def test_a_policy_that_is_broken_is_seen(make_run, tmp_path):
    html = run_page(read_run(make_run(tmp_path / "run"))).replace("</body>", "<script>alert(1)</script></body>")
    _, console = opened(html, tmp_path)
    assert any("Content Security Policy" in line for line in console)
