"""One line of a bar: the numbers of the last update, and means since the process began."""

from dflash_offline.train.status_line import StatusLine

NUMBERS = {
    "loss": 2.34567,
    "accuracy": 0.4321,
    "accepted_drafts_teacher_forced": 1.555,
    "lr": 0.0006,
    "step_s": 2.0,
    "wait_s": 0.5,
    "num_tokens": 3000,
    "rows_ready": 2.0,
}


def test_the_line_names_everything_that_one_watches() -> None:
    line = StatusLine(noise=0.05, slots=3)
    text = line.text(NUMBERS)
    assert text == (
        "loss 2.346, acc 43.2 %, streak 1.55, acceptance -, lr 6.00e-04, noise 0.05, 1,500 tok/s, "
        "data wait 25 %, queue 2/3"
    )


def test_rate_and_wait_are_means_over_time_and_noise_is_named_only_where_there_is_some() -> None:
    line = StatusLine(slots=3)
    line.text(NUMBERS)
    line.acceptance = 3.456
    text = line.text({**NUMBERS, "step_s": 6.0, "wait_s": 0.3, "num_tokens": 5000, "rows_ready": 0.0})
    assert text.endswith("acceptance 3.46, lr 6.00e-04, 1,000 tok/s, data wait 10 %, queue 0/3")
