"""``python -m overlap_pass`` is ``overlap-pass``."""

from __future__ import annotations

from overlap_pass.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
