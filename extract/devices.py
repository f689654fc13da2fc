"""Which devices a stage uses: what the user typed, or a default that suits the machine.

Knows text and counts; asks the machine through torch only where it must. At most one worker
runs on a CUDA device, because each worker holds a whole target: with more shards than
devices the work, which is dealt at run time, queues for the workers there are. On a CPU
every shard is a worker. Several GPUs that hold one target together are one device here,
spelled like "cuda:0+cuda:1".
"""

import re
from dataclasses import dataclass

from .. import UserError

EXTRACT_SHARE = 6  # of 8 GPUs; train takes the rest (design, section 3)
TOGETHER = "+"
NUMBERS = re.compile(r"0*([0-9]{1,18})(?:-0*([0-9]{1,18}))?")  # of any number of digits, int() may fail


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """How a list of numbers is spelled, and what its errors call its numbers."""

    option: str
    what: str
    kind: str
    like: str
    prefix: str = ""
    more_advice: str = ""


DEVICES = Named(option="devices", what="device", kind="CUDA device", like="0-5, 0,2 or cpu", prefix="cuda:")
SHARDS = Named(option="only", what="shard", kind="shard", like="0-5 or 0,2", more_advice=" or --shards")


def choose_devices(text: str | None, available: int, gpus_per_shard: int = 1) -> tuple[str, ...]:
    """The devices to extract on, like ("cuda:0", "cuda:1"), ("cuda:0+cuda:1",) or ("cpu",).

    `text` is "cpu", "0-5", "0,2", "cuda:1" or None (the first six GPUs of eight or more, all of
    fewer, else the CPU, and of a target on several GPUs as many as make whole groups); `available`
    is how many CUDA devices the machine has. Raises UserError for text that names no device, one
    device twice, or one that is not there, and for GPUs that do not make whole groups.
    """
    if text is None:
        count = max(EXTRACT_SHARE, gpus_per_shard) if available >= 8 else available
        count = min(count, available) // gpus_per_shard * gpus_per_shard or available
        single = tuple(f"cuda:{i}" for i in range(count)) or ("cpu",)
    else:
        single = named_devices(text, available)
    return grouped(single, gpus_per_shard)


def grouped(devices: tuple[str, ...], gpus_per_shard: int) -> tuple[str, ...]:
    """Devices dealt in the order given to groups that hold one target together."""
    if gpus_per_shard == 1:
        return devices
    if devices == ("cpu",):
        raise UserError(
            f"gpus_per_shard = {gpus_per_shard} on a CPU",
            f"at least {gpus_per_shard} CUDA devices",
            "drop --gpus-per-shard, or name the devices with --devices",
        )
    if len(devices) % gpus_per_shard:
        raise UserError(
            f"gpus_per_shard = {gpus_per_shard} with {len(devices)} devices ({', '.join(devices)})",
            f"a multiple of {gpus_per_shard} devices, so that none stays idle",
            "correct --devices or --gpus-per-shard",
        )
    starts = range(0, len(devices), gpus_per_shard)
    return tuple(TOGETHER.join(devices[start : start + gpus_per_shard]) for start in starts)


def single_devices(device: str) -> tuple[str, ...]:
    """The devices of a group, one for any other."""
    return tuple(device.split(TOGETHER))


def named_devices(text: str, available: int) -> tuple[str, ...]:
    """The devices that a text names, "cpu" or numbers of CUDA devices that are there."""
    if text.strip() == "cpu":
        return ("cpu",)
    there = f"this machine has CUDA devices 0-{available - 1}" if available else "this machine has no CUDA device"
    numbers = parse_numbers(text, DEVICES, available, there)
    return tuple(f"cuda:{number}" for number in numbers)


def own_shards(text: str, shards: int) -> tuple[int, ...]:
    """The shards that "0-5" or "0,2" names, of 0 .. shards - 1; raises UserError for anything else."""
    there = f"shards 0-{shards - 1}, as shards = {shards} says"
    return tuple(sorted(parse_numbers(text, SHARDS, shards, there)))


def parse_numbers(text: str, named: Named, num_there: int, there: str) -> list[int]:
    """The numbers of "0-5" or "0,2" or "cuda:0,cuda:3", in the order given; `there` tells which of them there are.

    Raises UserError for anything else, for a number twice, and for one that is not below `num_there`, before a list
    gets as long as the text asks for.
    """
    numbers: dict[int, None] = {}
    shown, advice = f"{named.option} = {text!r:.80}", f"correct --{named.option}"
    for part in text.split(","):
        match = NUMBERS.fullmatch(part.strip().removeprefix(named.prefix))
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise UserError(f"{shown} is no list of {named.what}s", f"like {named.like}", advice)
        if last >= num_there:
            raise UserError(f"{shown} names {named.kind} {last}", there, f"{advice}{named.more_advice}")
        for number in range(first, last + 1):
            if number in numbers:
                raise UserError(f"{shown} names {named.what} {number} twice", f"each {named.what} once", advice)
            numbers[number] = None
    return list(numbers)


def choose_workers(devices: tuple[str, ...], shards: int | None) -> tuple[str, ...]:
    """The device of each worker; `shards` defaults to one per device.

    CPU workers share the one device; CUDA workers are never more than the devices.
    """
    if devices == ("cpu",):
        return devices * (shards or 1)
    return devices[: shards or len(devices)]


def num_cuda_devices() -> int:
    """How many CUDA devices torch sees; makes no context on them."""
    import torch

    return torch.cuda.device_count()
