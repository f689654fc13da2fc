"""Which trainer processes a command starts, and which one of how many each is. Knows text and counts; no torch.

A trainer is a *rank*: alone, one of several that this command starts on its devices, or the one that `torchrun` or
`srun` started this command for.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .. import UserError

EXTRACT_SHARE = 6  # of 8 GPUs; extract takes them by default, train the rest (design, section 3)
LIKE = "auto, cpu, cuda, cuda:0, 6,7, 0-3 or cuda:6,cuda:7"
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """Trainer `number` of `count` (from 0) on `device`; `has_address` says that MASTER_ADDR and MASTER_PORT hold."""

    number: int = 0
    count: int = 1
    device: str = "cpu"
    num_local: int = 1  # trainers on this machine, as far as is known
    has_address: bool = False

    @property
    def name(self) -> str:
        """How this process is called wherever it is spoken of."""
        return self.named("trainer")

    def named(self, what: str) -> str:
        """The name of one of its processes; ranks are told apart where there are several."""
        return what if self.count == 1 else f"{what} {self.number}"


def ranks_here(devices: str, num_cuda: int, rows_per_step: int | None, environment: Mapping[str, str]) -> list[Rank]:
    """The ranks that this command starts: one, where `torchrun` or `srun` starts a command for each.

    `rows_per_step` bounds what `auto` takes: a rank without a row in a step would only wait. Raises UserError for
    `devices` that are none and for an environment that names a rank without saying where the first one is.
    """
    given = rank_in(environment)
    if given is None:
        chosen = choose_devices(devices, num_cuda, rows_per_step)
        return [
            Rank(number=i, count=len(chosen), device=device, num_local=len(chosen)) for i, device in enumerate(chosen)
        ]
    number, count, local = given
    if count > 1:
        require_address(environment)
    device = device_of(devices, num_cuda, local)
    return [Rank(number=number, count=count, device=device, has_address=count > 1)]


def rank_in(environment: Mapping[str, str]) -> tuple[int, int, int] | None:
    """Number, count and number on this machine of the rank that an environment names; None where it names none.

    SLURM sets its names in a batch script, too, which is no task of a step: only those of `srun` count.
    """
    for names in (TORCHRUN, SLURM):
        if names[0] not in environment or (names is SLURM and "SLURM_STEP_ID" not in environment):
            continue
        texts = [environment.get(name, "") for name in names]
        if not all(text.isdecimal() for text in texts) or not int(texts[0]) < int(texts[1]):
            said = ", ".join(f"{name} = {text!r}" for name, text in zip(names, texts))
            raise UserError(
                f"the environment says {said}",
                f"three whole numbers, {names[0]} below {names[1]}",
                f"start the command with torchrun or srun, or unset {names[0]}",
            )
        return int(texts[0]), int(texts[1]), int(texts[2])
    return None


def require_address(environment: Mapping[str, str]) -> None:
    """Raises UserError unless the environment says where rank 0 listens."""
    missing = [name for name in ADDRESS if not environment.get(name)]
    if missing:
        raise UserError(
            f"this is one of several ranks, and {' and '.join(missing)} are not set",
            "the name of rank 0's machine and a free port on it, the same for every rank",
            "start with torchrun, or export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) "
            "and MASTER_PORT=29500 before srun",
        )


def device_of(devices: str, num_cuda: int, local: int) -> str:
    """The device of rank `local` on its machine: its own of those named, or of those there are."""
    if devices == "auto":  # a launcher may show each of its processes a single GPU
        return "cpu" if not num_cuda else "cuda:0" if num_cuda == 1 else f"cuda:{local}"
    named = named_devices(devices)
    if named == ["cpu"]:
        return "cpu"
    if local >= len(named):
        raise UserError(
            f"devices = {devices!r}, and this is rank {local} of its machine (counted from 0)",
            "as many devices as ranks on each machine",
            "drop --devices, or start fewer ranks",
        )
    return named[local]


def choose_devices(devices: str, num_cuda: int, rows_per_step: int | None) -> list[str]:
    """The devices of the ranks of one machine. `auto`: of eight GPUs and more those behind the first six, of fewer
    all, no more than a step has rows; without any the CPU."""
    if devices != "auto":
        return named_devices(devices)
    if not num_cuda:
        return ["cpu"]
    first = EXTRACT_SHARE if num_cuda >= 8 else 0
    chosen = [f"cuda:{number}" for number in range(first, num_cuda)]
    return chosen[:rows_per_step]


def named_devices(devices: str) -> list[str]:
    """The devices that a text names, in its order; the CPU may be named once for each of several ranks."""
    found: list[str] = []
    for part in devices.split(","):
        found += named_device(part.strip(), devices)
    repeated = [device for device in found if device != "cpu" and found.count(device) > 1]
    if repeated:
        raise UserError(f"devices = {devices!r} names {repeated[0]} twice", "each device once", "correct --devices")
    if "cpu" in found and set(found) != {"cpu"}:
        raise UserError(f"devices = {devices!r} mixes CPU and CUDA", "devices of one type", "correct --devices")
    return found


def named_device(part: str, devices: str) -> list[str]:
    """What one part between commas names."""
    if part == "cpu":
        return [part]
    if part == "cuda":
        return ["cuda:0"]
    first, dash, last = part.removeprefix("cuda:").partition("-")
    if not first.isdecimal() or (dash and (not last.isdecimal() or int(last) < int(first))):
        raise UserError(f"devices = {devices!r} is no list of devices", f"like {LIKE}", "correct --devices")
    return [f"cuda:{number}" for number in range(int(first), int(last or first) + 1)]


def require_rows(rows_per_step: int, count: int) -> None:
    """Raises UserError where a step has fewer rows than there are ranks."""
    if rows_per_step < count:
        raise UserError(
            f"rows.rows_per_step = {rows_per_step} with {count} ranks",
            "at least one row of every step for each rank",
            f"--set rows.rows_per_step={count} for a new run, or name fewer devices with --devices",
        )
