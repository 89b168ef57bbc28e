"""No room gets denser, and no optional feature spreads to more files: the ruler of `make check`.

python -m tools.ratchet           # exit status 1 if a figure is worse than in tools/ratchet.json
python -m tools.ratchet tighten   # writes figures that became better; worse ones stay, and fail
python -m tools.ratchet write     # writes all figures; a commit that makes one worse says why

The figures are those of `tools.density` by room and the files elsewhere of `tools.rent` by
feature. A room or feature that is not in the file yet must not be worse than the whole (a room) or
is written without a limit (a feature).
"""

import json
import sys
from pathlib import Path

from tools import density, rent

COMMITTED = Path(__file__).with_name("ratchet.json")
Figures = dict[str, dict[str, float]]
"""Room or feature → name of a figure → its value."""


def measured() -> Figures:
    """Returns the figures of this checkout."""
    rooms = {name: room.figures() for name, room in density.measure().items()}
    features = {
        f"feature {name}": {"files_elsewhere": float(cost.files_elsewhere)}
        for name, cost in rent.costs(density.ROOT).items()
    }
    return rooms | features


def worse(now: Figures, committed: Figures) -> list[str]:
    """Returns a sentence for each figure that is larger than the committed one."""
    found = []
    for name, figures in now.items():
        limits = committed.get(name)
        if limits is None and not name.startswith("feature "):
            limits = committed["all"]
        if limits is None:
            continue
        for figure, value in figures.items():
            limit = limits.get(figure)
            if limit is not None and not value <= limit:
                found.append(f"{name}: {figure} is {value:g}, was {limit:g}")
    return found


def tightened(now: Figures, committed: Figures) -> Figures:
    """Returns the better ones of both, of what there is now."""
    result: Figures = {}
    for name, figures in now.items():
        limits = committed.get(name, figures)
        result[name] = {
            figure: min(value, limits.get(figure, value)) for figure, value in figures.items()
        }
    return result


def main(command: str = "check") -> int:
    now = measured()
    committed: Figures = {}
    if COMMITTED.exists():
        committed = json.loads(COMMITTED.read_text("utf-8"))
    if command in ("tighten", "write"):
        written = now if command == "write" else tightened(now, committed)
        COMMITTED.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
        return 0
    found = worse(now, committed)
    if found:
        print("denser than tools/ratchet.json allows:", *found, sep="\n  ")
        print(
            "`python -m tools.density list ROOM` prints the places; `python -m tools.ratchet "
            "write` accepts the figures, with a reason in the commit."
        )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
