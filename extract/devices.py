"""Which devices a stage uses: what the user typed, or a default that suits the machine.

Knows text and counts; asks the machine through torch only where it must. At most one worker
runs on a CUDA device, because each worker holds a whole target: with more shards than
devices the work, which is dealt at run time, queues for the workers there are. On a CPU
every shard is a worker.
"""

from .. import UserError

EXTRACT_SHARE = 6  # of 8 GPUs; train takes the rest (design, section 3)


def choose_devices(text: str | None, available: int) -> tuple[str, ...]:
    """The devices to extract on, like ("cuda:0", "cuda:1") or ("cpu",).

    `text` is "cpu", "0-5", "0,2", "cuda:1" or None (the first six GPUs of eight or more, all of
    fewer, else the CPU); `available` is how many CUDA devices the machine has.
    Raises UserError for text that names no device, one device twice, or one that is not there.
    """
    if text is None:
        count = EXTRACT_SHARE if available >= 8 else available
        return tuple(f"cuda:{i}" for i in range(count)) or ("cpu",)
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


def parse_numbers(text: str) -> list[int]:
    """The numbers of "0-5" or "0,2" or "cuda:0,cuda:3", in the order given."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().removeprefix("cuda:").partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise UserError(f"devices = {text!r} is no list of devices", "like 0-5, 0,2 or cpu", "correct --devices")
        numbers += range(int(first), int(last or first) + 1)
    repeated = {number for number in numbers if numbers.count(number) > 1}
    if repeated:
        raise UserError(
            f"devices = {text!r} names device {min(repeated)} twice", "each device once", "correct --devices"
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
