"""The picture of timelines is an SVG that shows all of a timeline, to scale."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from overlap_pass.report import picture
from overlap_pass.timeline.spans import Span, SpanKind, Timeline
from overlap_pass.timeline.stats import measure

SVG = "{http://www.w3.org/2000/svg}"
BEFORE = Timeline(
    "as written",
    1_000_000,
    (
        Span("ag", SpanKind.COMMUNICATION, "g0", 0, 400_000, "all_gather"),
        Span("mm", SpanKind.COMPUTE, "compute", 300_000, 900_000),
        Span("rs", SpanKind.COMMUNICATION, "g0", 500_000, 1_000_000, "reduce_scatter"),
    ),
    predicted=True,
)
AFTER = Timeline("scheduled", 700_000, (Span("mm & <co>", SpanKind.COMPUTE, "compute", 0, 600_000),), predicted=True)


def drawn(*timelines: tuple[str, Timeline]) -> ElementTree.Element:
    return ElementTree.fromstring(picture.render(timelines, alt='one "step", <before> & after'))


def widths(svg: ElementTree.Element, kind: str) -> list[float]:
    return [float(bar.attrib["width"]) for bar in svg.iter(f"{SVG}rect") if bar.attrib.get("class") == kind]


def test_widths_are_times_on_one_scale():
    svg = drawn(("before", BEFORE), ("after", AFTER))
    whole, shorter = sorted(set(widths(svg, "track")), reverse=True)
    assert shorter / whole == pytest.approx(0.7, abs=0.001)
    assert [width / whole for width in widths(svg, "compute")] == pytest.approx([0.6, 0.6], abs=0.001)
    assert [width / whole for width in widths(svg, "communication")] == pytest.approx([0.4, 0.5], abs=0.001)


def test_what_is_hatched_is_the_exposed_time():
    """300 of the gather and 100 µs of the reduction, as the figures say."""
    svg = drawn(("before", BEFORE))
    [whole] = set(widths(svg, "track"))
    assert [width / whole for width in widths(svg, "exposed")] == pytest.approx([0.3, 0.1], abs=0.001)
    assert measure(BEFORE).exposed_ns == 400_000


def test_lanes_captions_and_lengths_can_be_read_and_compute_comes_first():
    words = [text.text for text in drawn(("before <1>", BEFORE)).iter(f"{SVG}text")]
    assert words[0] == "before <1>"
    assert {"gather", "reduce", "1.0 ms"} <= set(words)
    assert words.index("compute") < words.index("g0")


def test_it_says_what_it_shows_and_loads_nothing():
    text = picture.render([("a", BEFORE)], alt='one "step"')
    assert ElementTree.fromstring(text).attrib["aria-label"] == 'one "step"'
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_nothing_to_draw_is_an_empty_picture():
    assert not widths(drawn(), "track")
