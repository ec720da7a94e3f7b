"""A log folder that TensorBoard opens: the traces for its profiler plugin, and our figures beside them.

torch-tb-profiler counts communication by op names that current versions of torch do not use, so on modern traces its
communication and overlap figures are wrong. The text page in the same folder says which figures are ours.

It also has its charts drawn by a script from Google's servers, so without a network they stay empty. What is ours needs
none: scalars and text are TensorBoard's own, and the page of the analysis lies in the folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from overlap_pass.errors import EnvironmentRefused, TraceError
from overlap_pass.report import analysis_html
from overlap_pass.report.analysis import AnalysisReport, part
from overlap_pass.report.table import percent, time_ns
from overlap_pass.traces.figures import DeviceFigures

__all__ = ["PAGE", "page", "require", "write"]

PAGE = "overlap-pass.html"
"""The page of the analysis, in the log folder."""

_WARNING = (
    "The figures on this page are those of overlap-pass. The profiler plugin's own figures of communication and overlap are "
    "wrong on traces of current versions of PyTorch: it does not know their collectives and counts them as compute. Its "
    f"charts are drawn by a script from Google's servers and stay empty without a network; {PAGE} in the log folder has "
    "charts that need none."
)


def require() -> None:
    """
    Raises:
        EnvironmentRefused: tensorboard is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise EnvironmentRefused("--tensorboard needs tensorboard: pip install 'overlap-pass[tensorboard]'")


def write(report: AnalysisReport, folder: Path) -> None:
    """Write the folder; traces are linked where the file system can, else copied.

    Raises:
        EnvironmentRefused: tensorboard is not installed.
        TraceError: the folder cannot be written.
    """
    require()
    writers = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    events = importlib.import_module("tensorboard.compat.proto.event_pb2")
    summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    tensors = importlib.import_module("tensorboard.compat.proto.tensor_pb2")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, path in _traces(report.analysis.devices):
            _link(path, folder / name)
        (folder / "overlap-pass.md").write_text(page(report), encoding="utf-8")
        (folder / PAGE).write_text(analysis_html.render(report), encoding="utf-8")
        writer = writers.EventFileWriter(str(folder))
        for step, summary in _summaries(report, summaries, tensors):
            writer.add_event(events.Event(wall_time=float(step), step=step, summary=summary))
        writer.close()
    except OSError as error:
        raise TraceError(f"{folder}: cannot be written ({error.strerror or error})") from error


def _traces(devices: Iterable[DeviceFigures]) -> Iterator[tuple[str, Path]]:
    """The plugin takes what is before ``.pt.trace.json`` for the worker's name."""
    seen: set[str] = set()
    for device in devices:
        if device.path in seen:
            continue
        seen.add(device.path)
        worker = f"rank{device.rank}" if device.rank is not None else f"trace{len(seen) - 1}"
        yield f"{worker}.pt.trace.json{'.gz' if device.path.endswith('.gz') else ''}", Path(device.path)


def _link(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        return
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        # Another file system, or one without links.
        shutil.copyfile(source, target)


def _summaries(report: AnalysisReport, summaries: Any, tensors: Any) -> Iterator[tuple[int, Any]]:
    plugin = summaries.SummaryMetadata(plugin_data=summaries.SummaryMetadata.PluginData(plugin_name="text"))
    text = tensors.TensorProto(dtype=7, string_val=[page(report).encode()])  # 7 is DT_STRING
    yield 0, summaries.Summary(value=[summaries.Summary.Value(tag="overlap-pass", metadata=plugin, tensor=text)])
    for device in report.analysis.devices:
        for position, step in enumerate(device.steps):
            stats = step.stats
            figures = {
                "step": stats.step_ns,
                "compute": stats.compute_ns,
                "exposed": stats.exposed_ns,
                "idle": stats.idle_ns,
            }
            values = [(f"{device.label}/{name}_ms", time / 1e6) for name, time in figures.items()]
            if stats.hidden_fraction is not None:
                values.append((f"{device.label}/hidden_percent", 100 * stats.hidden_fraction))
            rows = [summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in values]
            yield position if step.number is None else step.number, summaries.Summary(value=rows)


def page(report: AnalysisReport) -> str:
    """Markdown."""
    lines = [f"# {_plain(report.title)}", "", _plain(report.verdict), "", f"**{_WARNING}**", ""]
    lines += ["| device | step | compute | exposed | hidden | idle |", "| --- | --- | --- | --- | --- | --- |"]
    for device in report.analysis.devices:
        stats = device.step.stats
        hidden = None if stats.hidden_fraction is None else 100 * stats.hidden_fraction
        lines.append(
            f"| {_plain(f'{device.label}, {device.step.name}')} | {time_ns(stats.step_ns)} | {part(stats.compute_ns, device.step)} | "
            f"{part(stats.exposed_ns, device.step)} | {percent(hidden)} | {part(stats.idle_ns, device.step)} |"
        )
    lines.append("")
    for number, finding in enumerate(report.findings, 1):
        title, action = _plain(finding.title), _plain(finding.action)
        lines.append(f"{number}. **{title}**: {time_ns(finding.cost_ns)} a step. {action}")
    return "\n".join([*lines, "", *(f"- {_plain(note)}" for note in report.notes)]) + "\n"


def _plain(text: str) -> str:
    """Text with names from a trace: neither HTML nor Markdown."""
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", escape(" ".join(text.split()), quote=False))
