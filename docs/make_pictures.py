"""Draws the pictures of the pages with the project's own tools; run by hand when what they show has changed.

    python docs/make_pictures.py                  # timelines, as SVG
    python docs/make_pictures.py --screenshots    # and pages as they look in Chromium, as PNG

Timelines are plans of ``picture_model.py``, four blocks of the size of Llama-3-8B's, for 8 × H100.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from picture_model import build

from overlap_pass.config import Config
from overlap_pass.cost.hardware import Hardware
from overlap_pass.cost.model import price
from overlap_pass.graph.program import Program
from overlap_pass.planning import Plan, plan_step
from overlap_pass.profiling.trace_plan import trace_model
from overlap_pass.report import picture
from overlap_pass.simulate.engine import simulate
from overlap_pass.timeline.concatenate import concatenate
from overlap_pass.timeline.spans import Timeline

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "pictures"
RANKS = 8
SLOWER = 1.3

Programs = Sequence[Program]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these: {', '.join([*PICTURES, *PAGES])}")
    parser.add_argument("--screenshots", action="store_true", help="pages too, which needs chromium")
    parser.add_argument("--trace", nargs="*", default=[], help="traces for the page of an analysis")
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name in args.names or [*PICTURES, *(PAGES if args.screenshots else ())]:
        print(name, flush=True)
        if name in PICTURES:
            tokens, draw = PICTURES[name]
            (FOLDER / f"{name}.svg").write_text(draw(traced(tokens)), encoding="utf-8")
        elif name != "analysis":
            _photograph(name, PAGES[name])
        elif args.trace:
            _photograph(name, ["analyze", *args.trace, "--html"])


@cache
def traced(tokens: int) -> Programs:
    return trace_model(partial(build, tokens=tokens), world_size=RANKS)


def planned(programs: Programs, **options: str) -> list[Plan]:
    """Forward and backward, planned one after the other."""
    config = Config.from_options({"hardware": "h100", **options})
    hardware = config.hardware_for(None)
    return list(plan_step(programs, hardware, config.strategy, config.memory_budget, launches=config.launches))


def step(plans: Sequence[Plan], which: Callable[[Plan], Timeline] = lambda plan: plan.after.timeline) -> Timeline:
    forward, backward = (which(plan) for plan in plans)
    return concatenate(forward, backward, forward.label)


def before_after(programs: Programs) -> str:
    plans = planned(programs)
    rows = [
        ("as written: each parameter is gathered where it is read", step(plans, lambda plan: plan.before.timeline)),
        ("scheduled by overlap-pass", step(plans)),
    ]
    return picture.render(
        rows, alt="One training step before and after: the red, exposed communication is all but gone"
    )


def policies(programs: Programs) -> str:
    rows = [
        ("as_written", "as_written: nothing moves"),
        ("backward_post", "backward_post: the next unit's gather behind this unit's compute"),
        ("backward_pre", "backward_pre: the next unit's gather before this unit's compute"),
        ("latest_start", "latest_start: each gather as late as still hides it"),
    ]
    drawn = [
        (caption, planned(programs, strategy=name, memory_budget="unlimited")[-1].after.timeline)
        for name, caption in rows
    ]
    return picture.render(drawn, alt="The backward of one step under four prefetch policies")


def budgets(programs: Programs) -> str:
    drawn = [
        (f"memory_budget={budget!r}", step(planned(programs, memory_budget=budget)))
        for budget in ("1.0x", "fsdp2", "unlimited")
    ]
    return picture.render(drawn, alt="One step under three budgets: the more memory, the less is exposed")


def slow_link(programs: Programs) -> str:
    """The same order on a network that is slower than its price."""
    plans = planned(programs)
    hardware = Config.from_options({"hardware": "h100"}).hardware_for(None)
    drawn = [
        ("as planned", step(plans)),
        ("the same order, every collective 30 % slower", step(plans, lambda plan: _slower(plan, hardware))),
    ]
    return picture.render(drawn, alt="The planned step, and the same order on a slower network")


def _slower(plan: Plan, hardware: Hardware) -> Timeline:
    costs = price(plan.program, hardware)
    longer = {op.name: SLOWER * costs.duration_us[op.name] for op in plan.program.launches}
    slow = replace(costs, duration_us={**costs.duration_us, **longer})
    return simulate(plan.program, slow, plan.schedule.order).timeline


# Tokens a rank: enough to hide what is sent behind, or too few, so that memory decides.
PICTURES: Mapping[str, tuple[int, Callable[[Programs], str]]] = {
    "before-after": (4096, before_after),
    "policies": (4096, policies),
    "budgets": (2048, budgets),
    "slow-link": (2048, slow_link),
}


_MODEL = ["--model", "docs/picture_model.py:build", "--gpu", "h100"]
PAGES: Mapping[str, Sequence[str]] = {
    "report": ["plan", *_MODEL, "--world", str(RANKS), "--tokens", "4096", "--output"],
    "sweep": ["sweep", *_MODEL, "--world", "8,64", "--tokens", "1024,2048,4096,8192", "--output"],
    "analysis": [],
}


def _photograph(name: str, command: Sequence[str]) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("no chromium on the path")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / f"{name}.html"
        subprocess.run([sys.executable, "-m", "overlap_pass", *command, str(page)], check=True, cwd=ROOT)
        for light, scheme in enumerate(("dark", "light")):
            # A virtual clock lets scripts and fonts settle before the picture is taken.
            flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=3000"]
            flags += ["--window-size=1280,900", f"--blink-settings=preferredColorScheme={light}"]
            picture_file = FOLDER / f"{name}-{scheme}.png"
            subprocess.run(
                [chromium, *flags, f"--screenshot={picture_file}", page.as_uri()], check=True, capture_output=True
            )


if __name__ == "__main__":
    main()
