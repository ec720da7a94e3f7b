"""What a profiler trace that somebody sent says about overlap, with our figures as Python objects.

    python examples/someone_elses_trace.py rank0.json.gz rank1.json.gz

Needs no GPU, and nothing of the program that was traced. ``overlap-pass analyze`` prints the same and more.
"""

from __future__ import annotations

import argparse

from overlap_pass.report.analysis import AnalysisReport
from overlap_pass.traces.analyse import analyse
from overlap_pass.traces.capture import read_trace
from overlap_pass.traces.files import find_traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", help="files, globs or folders; those of all ranks of one run")
    args = parser.parse_args()

    report = AnalysisReport.of(analyse([read_trace(path) for path in find_traces(args.traces)]))
    print(report.verdict)
    for device in report.analysis.devices:
        stats = device.step.stats
        print(
            f"{device.label}, {device.step.name}: {stats.step_ns / 1e6:.2f} ms, of it {stats.exposed_ns / 1e6:.2f} ms of "
            f"exposed communication and {stats.idle_ns / 1e6:.2f} ms idle"
        )
        for row in stats.worst(3):
            print(f"  {row.collective} of {row.unit or 'unknown module'}: {row.exposed_ns / 1e6:.2f} ms exposed")
    for finding in report.findings:
        print(f"- {finding.title}: {finding.action}")


if __name__ == "__main__":
    main()
