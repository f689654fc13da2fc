"""How fast a store was recorded: a line for each run of `extract`, for `plan` to foretell hours with.

`.runs.jsonl` in the store, one JSON object a line; no part of the format, and nothing is refused for it.
"""

import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import system_reason

LOG_NAME = ".runs.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one launcher recorded after its first batch, until its last."""

    host: str
    devices: str
    num_workers: int
    num_positions: int
    wall_s: float

    @property
    def rate(self) -> float:
        """Positions a second of one worker."""
        return self.num_positions / self.wall_s / self.num_workers


def log_run(store_dir: Path, *, workers: tuple[str, ...], num_positions: int, wall_s: float) -> str | None:
    """Adds a run in one write; one of a single batch tells nothing of speed.

    Raises nothing for a disk that takes no line: the run's own end is the news. Gives a line to say of it instead.
    """
    if not num_positions or wall_s <= 0:
        return None
    devices = ",".join(dict.fromkeys(workers))
    run = Run(
        host=socket.gethostname(),
        devices=devices,
        num_workers=len(workers),
        num_positions=num_positions,
        wall_s=round(wall_s, 3),
    )
    path = store_dir / LOG_NAME
    try:
        with path.open("ab", buffering=0) as log:
            log.write((json.dumps(asdict(run)) + "\n").encode())
    except OSError as error:
        return (
            f"the speed of this run is not in {str(path)!r}: {system_reason(error)}; "
            "`dflash plan` foretells no hours by it"
        )
    return None


def last_run(store_dir: Path) -> Run | None:
    """The newest run that can be read; None where there is none."""
    try:
        lines = (store_dir / LOG_NAME).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in reversed(lines):
        try:
            run = Run(**json.loads(line))
            return run if run.rate > 0 else None
        except (ValueError, TypeError, ZeroDivisionError):
            continue
    return None
