"""What would make a job fit, and one job over many GPUs: every figure from a run."""

from dataclasses import dataclass, replace

import pytest

from ullage.errors import InvalidValue
from ullage.estimation.advice import OutOfTime, larger_gpu, options
from ullage.estimation.asking import answer_request, estimate
from ullage.estimation.jobs.child import advise
from ullage.estimation.over_gpus import estimate_over_gpus
from ullage.hardware import gpu, gpus, select_gpus
from ullage.jobs import JobRequest, Model, Script, train

GIB = 2**30


@dataclass(frozen=True)
class Job:
    """Stands for a configuration; its memory is a formula, so that the right answers are known."""

    batch_size: int = 100
    optimizer: str = "adamw"
    precision: str = "fp32"
    checkpointing: bool = False
    gradient_accumulation: int = 1


def formula(job: Job, card) -> object:
    if job.checkpointing and job.precision == "amp_fp16":
        raise InvalidValue("this model has no checkpointing")
    weights = {"adamw": 4, "adafactor": 2, "sgdm": 3, "sgd": 2}[job.optimizer] * GIB // 4
    activations = job.batch_size * GIB // 10 // (2 if job.precision != "fp32" else 1) // (3 if job.checkpointing else 1)
    extra = GIB // 4 if job.gradient_accumulation > 1 else 0
    process = weights + activations + extra
    e = estimate(lambda: None, gpu=card, steps=None)
    return replace(
        e,
        process_memory=process,
        peak_reserved=process,
        peak_allocated=process - GIB,
        upper=process,
        fits=process <= card.usable,
        headroom=card.usable - process,
    )


def found(job, card_name, **named):
    return {option.change: option for option in options(job, card_name, formula, **named)}


def test_every_suggestion_is_estimated_and_the_batch_is_exact():
    seen = []
    answers = found(Job(), "RTX-4060", progress=seen.append)  # 7.62 GiB usable; the job takes 11
    assert answers["mixed precision (amp_bf16)"].fits and answers["activation checkpointing"].fits
    assert not any("optimizer" in change for change in answers)  # half a GiB is no help worth naming
    usable = gpu("RTX-4060").usable
    batch = next(int(change.split()[1]) for change in answers if change.startswith("batch"))
    assert GIB + batch * GIB // 10 <= usable < GIB + (batch + 1) * GIB // 10
    parts = answers["gradient accumulation: 2 micro-batches of 50"].estimate
    assert parts.process_memory == GIB + 5 * GIB + GIB // 4
    larger = next(option for change, option in answers.items() if change.startswith("a larger GPU"))
    assert larger.fits and larger.estimate.gpu_memory > usable
    smaller = [card.name for card in gpus() if not card.is_mig and usable < card.usable < larger.estimate.gpu_memory]
    assert not [name for name in smaller if gpu(name).usable >= 11 * GIB]
    assert {"activation checkpointing", "optimizer sgdm for adamw"} <= set(seen)


def test_changes_that_help_only_together_and_an_impossible_one():
    answers = found(Job(batch_size=390), "RTX-4060")
    assert answers["mixed precision (amp_bf16) and activation checkpointing"].fits
    assert not answers["activation checkpointing"].fits
    failed = found(Job(batch_size=390), "GTX-1080")["mixed precision (amp_fp16) and activation checkpointing"]
    assert failed.estimate is None and failed.failed == "this model has no checkpointing"


def test_a_job_that_uses_everything_already():
    answers = found(Job(batch_size=1000, precision="bf16", checkpointing=True, optimizer="sgd"), "RTX-4060")
    assert [change.split()[0] for change in answers] == ["gradient", "batch", "a"]


def test_no_gpu_is_large_enough():
    answer = formula(Job(batch_size=100_000), gpu("RTX-4060"))
    assert larger_gpu(lambda card: formula(Job(batch_size=100_000), card), answer) is None


def run_here(configuration, gpu):
    return answer_request(JobRequest(configuration), gpu)


@pytest.mark.slow
def test_a_real_configuration():
    job = Model("mlp:x", settings={"widths": [2048, 16384, 16384, 10]}, batch_size=50_000, optimizer="adamw")
    answer = estimate(lambda: train(job), gpu="RTX-4060")
    assert not answer.fits
    answers = {option.change: option for option in options(job, "RTX-4060", run_here, answer=answer)}
    change = next(change for change in answers if change.startswith("batch"))
    batch = int(change.split()[1])
    assert estimate(lambda: train(replace(job, batch_size=batch)), gpu="RTX-4060").fits
    assert not estimate(lambda: train(replace(job, batch_size=batch + 1)), gpu="RTX-4060").fits
    assert any(option.fits for change, option in answers.items() if change.startswith("a larger GPU"))


@pytest.mark.slow
def test_gpus_with_equal_kernels_share_a_run_with_equal_results():
    job = Model("mlp:x", settings={"widths": [784, 4096, 10], "bn": True}, batch_size=512)
    ran = []

    def run(card):
        ran.append(card.name)
        return estimate(lambda: train(job), gpu=card)

    cards = select_gpus("ampere") + select_gpus("H200,H100-80GB,T4")
    answers = estimate_over_gpus(run, cards)
    assert [e.gpu for e in answers] == [card.name for card in cards]
    assert len(ran) == len(set(ran)) == sum(e.computed_on is None for e in answers) < len(cards) / 2
    for card, shared in zip(cards[::4] + cards[-3:], answers[::4] + answers[-3:], strict=True):
        own = estimate(lambda: train(job), gpu=card)
        for name in ("process_memory", "peak_reserved", "upper", "fits", "headroom", "breakdown", "measured"):
            assert getattr(shared, name) == getattr(own, name), (card.name, name)


def test_a_gpu_that_would_have_to_empty_its_cache_runs_itself():
    def pressed():  # takes and frees many sizes: 3 GiB reserved, of which 1 GiB at a time
        import torch

        for size in (1000, 1100, 1200):
            torch.empty(size << 20, dtype=torch.uint8, device="cuda")

    def run(card):
        return estimate(pressed, gpu=card, steps=None)

    small = replace(gpu("A40"), name="small-A40", memory=4 * GIB, usable=3 * GIB)
    answers = {e.gpu: e for e in estimate_over_gpus(run, [gpu("A40"), small])}
    assert answers["small-A40"].computed_on is None and answers["small-A40"].fits
    assert answers["A40"].peak_reserved > small.usable - small.context


@pytest.mark.parametrize(("text", "least"), [("all", 45), ("mig", 20), ("ampere", 10), ("T4,4090", 2), ("T4, T4", 1)])
def test_gpus_to_compare(text, least):
    assert len(select_gpus(text)) >= least
    assert len({card.name for card in select_gpus(text)}) == len(select_gpus(text))


@pytest.mark.parametrize("affordable", [0, 3])
def test_skipped_work_is_reported(affordable) -> None:
    job, card, tried = Job(batch_size=400, precision="amp_fp16"), gpu("T4"), []
    answer = formula(job, card)

    def run(changed, on):
        if len(tried) == affordable:
            raise OutOfTime("not tried: no time")
        tried.append(changed)
        return formula(changed, on)

    found = options(job, card, run, answer=answer)
    left_out = [option.change for option in found if option.failed == "not tried: no time"]
    assert len(tried) == affordable
    assert left_out[-2:] == ["a smaller batch", "a larger GPU"] and len(left_out) == 5 - affordable


def test_advice_of_a_script_keeps_to_its_time(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it was run')")
    card = gpu("T4")
    answer = replace(formula(Job(batch_size=400), card), seconds=50.0)
    request = JobRequest(Script(script, ["--batch-size", "8"]))
    found = advise(request, card, answer, {}, "--batch-size", seconds=40.0)
    assert found["largest"].startswith("the largest batch was not tried: an estimate takes 50 s")
    [option] = found["options"]
    assert (option["change"], option["fits"], option["takes"]) == ("a larger GPU", False, None)
