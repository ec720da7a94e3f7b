"""The pages of reports as a narrow screen lays them out: all text can be read, all that scrolls can be reached by keyboard.

The same search looks at the site of the pages, see ``tests/checks/test_site.py``.
"""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from overlap_pass.report import analysis_html, html
from tests.pure import comparisons
from tests.pure.test_analysis import two_ranks
from tests.pure.test_pages_in_browser import browser, in_browser, swept

# Text whose contrast with what is behind it is below that of WCAG AA; what scrolls and no key gets to.
SEARCH = """
<pre id="probe"></pre><script>
const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = (rgb) => rgb.slice(0, 3)
  .map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const over = (colour, ground) => [0, 1, 2].map((i) => ground[i] + (colour[3] ?? 1) * (colour[i] - ground[i]));
const behind = (element) => {
  if (element === null) return [255, 255, 255];
  const style = getComputedStyle(element), colour = channels(style.backgroundColor);
  if (style.backgroundImage !== "none") return null;
  if ((colour[3] ?? 1) === 1) return colour;
  const ground = behind(element.parentElement);
  return ground && over(colour, ground);
};
const faint = [], unreachable = [];
const texts = document.createTreeWalker(document.querySelector("WHERE"), NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const element = texts.currentNode.parentElement, text = texts.currentNode.data.trim();
  if (!text || !element.checkVisibility({opacityProperty: true, visibilityProperty: true}) || !element.getClientRects().length) continue;
  const style = getComputedStyle(element), ground = behind(element);
  if (ground === null || /script|style/i.test(element.tagName)) continue;
  const ink = over(channels(element.closest("svg") ? style.fill : style.color), ground);
  const [low, high] = [light(ink), light(ground)].sort((a, b) => a - b), contrast = (high + 0.05) / (low + 0.05);
  const large = parseFloat(style.fontSize) >= (style.fontWeight >= 700 ? 18.66 : 24);
  if (contrast < (large ? 3 : 4.5)) faint.push(`${text.slice(0, 40)}: ${contrast.toFixed(2)}`);
}
for (const element of document.body.querySelectorAll("*")) {
  const scrolls = /auto|scroll/.test(getComputedStyle(element).overflow) && element.scrollWidth > element.clientWidth;
  if (scrolls && element.tabIndex < 0 && !element.querySelector("button, a, [tabindex]"))
    unreachable.push(element.outerHTML.slice(0, 80));
}
const wider = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.getElementById("probe").textContent = JSON.stringify({faint, unreachable, wider});
</script>
"""


@in_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["analysis", "comparison", "sweep"])
def test_on_a_narrow_screen_all_text_can_be_read_and_all_that_scrolls_be_reached(
    tmp_path: Path, name: str, theme: str
) -> None:
    pages = {
        "analysis": lambda: analysis_html.render(two_ranks(tmp_path)),
        "comparison": lambda: html.render(comparisons.predicted()),
        "sweep": swept,
    }
    assert searched(tmp_path, pages[name](), theme) == {"faint": [], "unreachable": [], "wider": 0}


@in_browser
def test_the_search_finds_what_is_faint_and_what_no_key_gets_to(tmp_path: Path) -> None:
    poor = (
        '<body style="background: #fff"><p style="color: #999">faint</p><p style="color: #767676">enough</p>'
        '<p style="color: rgba(0, 0, 0, 0.5)">half</p>'
        '<div style="overflow: auto; width: 9em"><pre style="width: 99em">wide</pre></div></body>'
    )
    found = searched(tmp_path, poor, "light")
    assert found["faint"] == ["faint: 2.85", "half: 3.98"]
    assert len(found["unreachable"]) == 1


def searched(folder: Path, page: str, theme: str, *, where: str = "body") -> dict[str, Any]:
    """What was found in the elements that the selector ``where`` chooses."""
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    scheme = f"--blink-settings=preferredColorScheme={int(theme == 'light')}"
    done = browser(
        folder,
        free.replace("</body>", SEARCH.replace("WHERE", where) + "</body>"),
        scheme,
        "--window-size=500,900",
        "--dump-dom",
    )
    probe = re.search(r'<pre id="probe">(.+?)</pre>', done.stdout, re.DOTALL)
    assert probe is not None, done.stderr
    answers: dict[str, Any] = json.loads(unescape(probe[1]))
    return answers
