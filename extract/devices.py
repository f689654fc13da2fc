"""Which devices a stage uses: what the user typed, or a default that suits the machine.

Knows text and counts; asks the machine through torch only where it must. At most one worker
runs on a CUDA device, because each worker holds a whole target: with more shards than
devices the work, which is dealt at run time, queues for the workers there are. On a CPU
every shard is a worker. Several GPUs that hold one target together are one device here,
spelled like "cuda:0+cuda:1".
"""

from .. import UserError

EXTRACT_SHARE = 6  # of 8 GPUs; train takes the rest (design, section 3)
TOGETHER = "+"


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
    numbers = parse_numbers(text)
    there = f"CUDA devices 0-{available - 1}" if available else "no CUDA device"
    for number in numbers:
        if number >= available:
            raise UserError(
                f"devices = {text!r} names CUDA device {number}", f"this machine has {there}", "correct --devices"
            )
    return tuple(f"cuda:{number}" for number in numbers)


def own_shards(text: str, shards: int) -> tuple[int, ...]:
    """The shards that "0-5" or "0,2" names, of 0 .. shards - 1; raises UserError for anything else."""
    numbers = parse_numbers(text, what="shard", option="only", like="0-5 or 0,2")
    if max(numbers) >= shards:
        raise UserError(
            f"only = {text!r} names shard {max(numbers)}",
            f"shards 0-{shards - 1}, as shards = {shards} says",
            "correct --only or --shards",
        )
    return tuple(sorted(numbers))


def parse_numbers(
    text: str, *, what: str = "device", option: str = "devices", like: str = "0-5, 0,2 or cpu"
) -> list[int]:
    """The numbers of "0-5" or "0,2" or "cuda:0,cuda:3", in the order given."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().removeprefix("cuda:" if what == "device" else "").partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise UserError(f"{option} = {text!r} is no list of {what}s", f"like {like}", f"correct --{option}")
        numbers += range(int(first), int(last or first) + 1)
    repeated = {number for number in numbers if numbers.count(number) > 1}
    if repeated:
        raise UserError(
            f"{option} = {text!r} names {what} {min(repeated)} twice", f"each {what} once", f"correct --{option}"
        )
    return numbers


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
