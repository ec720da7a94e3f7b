"""The pages of reports in a real browser, by keyboard alone, in both themes, and for eyes that tell red from green badly."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlap_pass.report import html, sweep_chart
from overlap_pass.report.sweep import Point, Sweep
from tests.pure import comparisons

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ASSETS = Path(html.__file__).parent / "assets"

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to open the page in")

PRESS = """
<pre id="probe"></pre><script>
const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
const said = () => document.getElementById("spoken").textContent;
const seen = () => [view.start, view.end];
const found = {whole: seen()};
canvas.focus();
found.focused = document.activeElement === canvas;
press("ArrowDown"); found.first = said();
press("ArrowDown"); found.second = said();
press("ArrowUp"); found.back = said();
press("0"); press("+"); found.closer = seen();
press("ArrowRight"); found.right = seen();
press("0"); found.again = seen();
document.getElementById("probe").textContent = JSON.stringify(found);
</script>
"""


def browser(folder: Path, page: str, *flags: str) -> subprocess.CompletedProcess[str]:
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={folder / 'profile'}", *flags, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def pressed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page of a comparison answers to keys; its policy, which lets no other script in, is taken out for that."""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html.render(comparisons.predicted()))
    done = browser(tmp_path_factory.mktemp("keys"), page.replace("</body>", PRESS + "</body>"), "--dump-dom")
    probe = re.search(r'<pre id="probe">(.+?)</pre>', done.stdout, re.DOTALL)
    assert probe is not None, done.stderr
    answers: dict[str, Any] = json.loads(unescape(probe[1]))
    return answers


@in_browser
def test_the_timeline_can_be_focused_and_arrows_speak_its_exposed_collectives(pressed: dict[str, Any]) -> None:
    assert pressed["focused"]
    assert pressed["first"].startswith("all_gather_0, as written")
    assert "exposed" in pressed["first"]
    assert pressed["second"] != pressed["first"]
    assert pressed["back"] == pressed["first"]


@in_browser
def test_keys_zoom_move_and_show_all_again(pressed: dict[str, Any]) -> None:
    (start, end), (closer_start, closer_end), (moved_start, moved_end) = (
        pressed[n] for n in ("whole", "closer", "right")
    )
    assert closer_end - closer_start < end - start
    assert moved_start > closer_start
    assert moved_end - moved_start == pytest.approx(closer_end - closer_start)
    assert pressed["again"] == [start, end]


def swept() -> str:
    points = tuple(
        Point(tokens, 8, "fsdp2", 2000.0, 900.0, 1500.0, exposed_us, 2**30, 1400.0)
        for tokens, exposed_us in ((1024, 600.0), (4096, 30.0))
    )
    return sweep_chart.render(Sweep("a model on 8 × h100", (), points))


@in_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["comparison", "sweep"])
def test_a_page_opens_without_a_complaint_in_either_theme(tmp_path: Path, name: str, theme: str) -> None:
    page = html.render(comparisons.predicted()) if name == "comparison" else swept()
    picture = tmp_path / "page.png"
    scheme = f"--blink-settings=preferredColorScheme={int(theme == 'light')}"
    done = browser(tmp_path, page, scheme, f"--screenshot={picture}")
    assert "CONSOLE" not in done.stderr
    assert picture.stat().st_size > 10_000


# -- colours ----------------------------------------------------------------------------------------------------------

# What a dichromat sees, in linear light (Viénot, Brettel and Mollon 1999).
PROTAN = np.array([[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]])
DEUTAN = np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]])


def colours(theme: str) -> dict[str, np.ndarray]:
    """The page's colours in linear light."""
    light, dark = (ASSETS / "page.css").read_text("utf-8").split("@media (prefers-color-scheme: dark)")
    text = light if theme == "light" else dark
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", text))
    channels = {name: np.array([int(value[i : i + 2], 16) for i in (1, 3, 5)]) / 255 for name, value in found.items()}
    return {n: np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) for n, c in channels.items()}


def contrast(first: np.ndarray, second: np.ndarray) -> float:
    """WCAG 2: from 1 to 21."""
    bright, dim = sorted((float(c @ np.array([0.2126, 0.7152, 0.0722])) for c in (first, second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_for(theme: str) -> None:
    c = colours(theme)
    pairs = [
        ("ink", "paper"),
        ("ink", "panel"),
        ("muted", "paper"),
        ("muted", "panel"),
        ("better", "panel"),
        ("worse", "panel"),
    ]
    pairs += [("on-compute", "compute"), ("on-hidden", "hidden"), ("on-copy", "copy")]
    assert {pair: contrast(c[pair[0]], c[pair[1]]) for pair in pairs if contrast(c[pair[0]], c[pair[1]]) < 4.5} == {}


@pytest.mark.parametrize("eye", [np.eye(3), PROTAN, DEUTAN], ids=["trichromat", "protanope", "deuteranope"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_a_step_is_made_of_can_be_told_apart_by_every_eye(theme: str, eye: np.ndarray) -> None:
    """By lightness or hue; exposed communication has a hatch of another lightness on top."""
    c = {name: np.clip(eye @ value, 0, 1) for name, value in colours(theme).items()}
    for first, second in combinations(("compute", "hidden", "exposed", "idle"), 2):
        apart = float(np.linalg.norm(np.sqrt(c[first]) - np.sqrt(c[second])))
        assert apart > 0.12, (first, second, apart)
    assert contrast(c["exposed"], c["exposed-line"]) > 1.8
