"""Read a printed step from one line: number, loss, gradient norm, durations.

    read_step(" iteration 100/ 5000 | elapsed time per iteration (ms): 812.0 | lm loss: 6.9E+00 | grad norm: 1.2 |")

docs/other-runs.md lists the known programs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from store.readers.logs.progress_bars import BAR_LITERALS, Bar, float_of, read_bar

__all__ = ["LITERALS", "StepLine", "epoch_heading_of", "heading_of", "read_step", "step_of"]

LITERALS = (
    b"loss", b"Loss", b"grad norm", b"grad_norm", b"skipped=", b"SamplesPerSec", b"tokens_per_second", b"/sec",
    b"/step", b"per iteration", b"per step", b"step_time", b"tep took ", b"ration took ", b"atch took ", b"[step=",
    b" train ", b"step_avg:", b"batches_per_sec", b"][batch=", b"poch ", b"poch:",
    b"G  ", b"consumed samples: ", *BAR_LITERALS,
)  # fmt: skip
_NUMBER = r"([-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+|[nN][aA][nN]|-?[iI][nN][fF](?:inity)?))"
_IS = r"['\"’”]?\s*[:=]?\s*['\"‘“]?\[?\s*"
"""Separator between a name and its value: `loss: 1`, `'loss': '1'`, `loss=1`, `Loss 1`."""
_STEPS = (
    ("max_steps",
     re.compile(r"global_step/max_steps['\"]?\s*:\s*['\"]?(?P<step>\d{1,12})(?:/(?P<total>\d{1,12}))?")),
    ("] ", re.compile(r"\[ *(?P<step>\d{1,12})/(?P<total>\d{1,12})\] +eta: ")),
    ("num_updates", re.compile(r"\bnum_updates" + _IS + r"(?P<step>\d{1,12})")),
    ("global", re.compile(r"\bglobal[_ ]step" + _IS + r"(?P<step>\d{1,12})(?:\.0+)?\b")),
    ("", re.compile(
        r"(?<!per )\b(?:step|steps|iteration|iters?|itr)['\"]?\s*[:=]?\s*[\[#]?\s*"
        r"(?P<step>\d{1,12})(?:\s*/\s*(?P<total>\d{1,12}))?\b(?!%)",  # not the percentage of a bar: `Steps:  3%|`
        re.IGNORECASE,
    )),
    ("Iter(", re.compile(r"\bIter\(train\) *\[ *(?P<step>\d{1,12})/(?P<total>\d{1,12})\]")),
)  # fmt: skip
"""Patterns of step numbers, each with a literal that every match contains."""
_STEP_WORD = re.compile("[sS][tT][eE][pP]|[iI][tT][eE]?[rR]")
_ITERATION = re.compile(r"\biter \d{1,12} step (\d{1,12})\b")
_IN_EPOCH = re.compile(
    r"(?:\bEpoch(?:\(train\))?(?P<zero>:)? *\[(?P<epoch>\d{1,7})\]|"
    r"\bTrain: (?P<timm>\d{1,7})) *\[ *(?P<step>\d{1,12})/ *"
    r"(?P<total>\d{1,12})(?: \( *\d+%\))?\]"
)
"""mmengine counts epochs from 1; the ImageNet example (`Epoch: [0]`) and timm count from 0."""
_BATCH = re.compile(
    r"\b[Ee]poch\b[ :=#\[(|-]{1,4}(?P<epoch>\d{1,7})(?![\d.])[^\n]{0,24}?\b(?:[Bb]atch|[Ss]tep|[Ii]te?r(?:ation)?)"
    r"\b[ :=#\[(|-]{1,12}(?P<step>\d{1,12}) *(?:/|of) *(?P<total>\d{1,12})"
)
"""Hand-written loops: `epoch: 5/20 - batch: 6/130`, `Epoch [1/5], Step [100/600]`."""
_BATCH_OF = re.compile(r"(?<![\d/])(?P<step>\d{1,12})/(?P<total>\d{1,12}) of [eE]poch (?P<epoch>\d{1,7})\b")
"""The same with the batch first: `30/42 of epoch 28/30`."""
_BATCH_HEADING = re.compile(
    r"^\[epoch=(?P<epoch>\d{1,7})(?:/\d{1,7})?\]\[batch=(?P<step>\d{1,12})/(?P<total>\d{1,12})\]:\s*$"
)
"""Composer's heading of a batch. The batch's values follow; the number counts within an epoch."""
_HEADING = re.compile(r"\[step=(?P<step>\d{1,12})(?:/(?P<total>\d{1,12}))?(?:,[^\]]{0,80})?\]\s*$")
"""OLMo's heading of a step; the values follow on indented lines."""
_EPOCH_HEADING = re.compile(
    r"[\s:=*#>-]{0,40}(?:[Ee]poch|EPOCH)\b[ :=#\[]{1,4}(?P<epoch>\d{1,7})(?: ?(?:/|of) ?\d{1,7})?\]?[\s:.=*#-]*\Z"
)
"""A line with nothing but an epoch's number (nnU-Net, PyTorch's tutorials); the losses of the epoch follow."""
_UNDER_BAR = re.compile(r"(?P<epoch>\d{1,6})/\d{1,6} +\d[\d.]*[GM] +(?P<values>(?:[\d.e+-]+ +|nan +|inf +){2,20})\d+:")
"""Ultralytics' row before its bar: epoch, memory, parts of the loss, labels, and the images' size."""
_ROW = re.compile(
    r"\s*(?P<step>\d{1,6})/(?P<total>\d{1,6}) +\d[\d.]*[GM] +"
    r"(?P<values>(?:(?:\d+\.[\d.e+-]*|\d+e-\d+|nan|inf|0) +){2,8})\d+ +\d+\b(?: +(?:\d[\d.e+-]*|nan|inf))*\s*\Z"
)
"""The same row without a bar, as in YOLOv5's logs and results.txt, perhaps followed by metrics."""
_COLUMNS = re.compile(rf"(?P<step>\d{{1,12}}) train {_NUMBER}\s*\Z")
"""Lines of build-nanogpt's file: step, split and loss."""
_SAMPLES = re.compile(r"\bTrain Epoch: \d+ \[|\bEpoch \d+ \| Batchsize: \d+ \| Steps: \d+ \|")
"""Lines to count: open_clip and the MNIST example print sample counts, torch's DDP tutorial the steps per epoch."""
_EPOCH = re.compile(r"\b[Ee](?:poch|POCH)\b[ :=#\[(|-]{1,4}\d")
_EPOCH_OF = re.compile(r"\b[Ee](?:poch|POCH)\b['\"]?[ :=#\[(|-]{1,4}['\"]?(\d{1,7}(?:\.\d+)?)")
_HELD_OUT = re.compile(r"\b(?:val|valid|validation|test|testing|eval|evaluation|dev)[a-z]*\Z", re.IGNORECASE)
"""Words before a loss that is not the training loss."""
# No IGNORECASE in patterns searched in every line: it takes three times as long.
_LOSS = re.compile(r"[lL](?:oss|OSS)(?: train|/train/total)?" + _IS + _NUMBER)
_OF_LOSS = re.compile(
    r"(?:^|[^\w/])(?:lm[ _]|reduced_(?:train_)?|total_|average_|avg_|avr_|step_|mean_|running_|batch_|"
    r"train(?:ing)?[_/ ]|(?:train/)?(?:CE |CrossEntropy)|(?:train/)?actor/(?:pg_)?)\Z",
    re.IGNORECASE,
)
"""Prefixes of names of the training loss; other names (`val_loss`, `loss_bbox`, `aux/loss`) are ignored."""
_PART_OF_LOSS = re.compile(rf"\b(?P<name>loss_[a-z]\w*|[a-z]\w*_loss)\s*[:=]\s*(?P<value>{_NUMBER})")
"""Components of a loss that is not printed as a sum. They show the step, and whether the loss was finite."""
_POLICY = re.compile(r"\bloss/(?:policy|value|total)(?:/total|_avg)?" + _IS + _NUMBER)
"""Losses of PPO in TRL's dictionaries. They show no progress, so only whether they are finite is read."""
_NAME_CHARS = 24
_GRAD_NORM = re.compile(r"(?:[gG](?:rad(?:ient)?[_ ]?)?[nN]orm|GRAD_NORM|(?<=\| )norm)" + _IS + _NUMBER)
_RATE = re.compile(r"(?:[lL](?:earning[_ ][rR]ate|(?<=\b[lL])[rR])|LEARNING_RATE)" + _IS + _NUMBER)
_UNIT = r"\s*(?P<unit>ms|us|s)?(?![\d:]|\s*[mh]\b|\s*%)"
_SECONDS = (
    r"elapsed time per iteration|[iI]ter(?:ation)?[_ ][tT]ime|[sS]tep[_ ][tT]ime|[tT]ime/step|timing_s/step|"
    r"[tT]ime per step|step_avg|perf/time_per_step|updt_s|train_step_timing in s|"
    r"(?<![\w/])(?<!total )(?<!wall )(?:(?:step_|iter_)?time_|step_|iter_|iteration_)?seconds"
)
_TIMES = (
    (("per_iteration_ms",),
     re.compile(rf"per_iteration_(?P<in>ms){_IS}(?P<value>{_NUMBER})(?P<scale>[KM]?)(?P<unit>)")),
    (("batch: iter_time",),
     re.compile(rf"\btrain_time=(?P<value>{_NUMBER}){_UNIT}")),
    (("ime", "timing", "seconds", "updt_s", "step_avg"),
     re.compile(rf"(?:{_SECONDS})(?: \((?P<in>ms|s)\))?{_IS}(?P<value>{_NUMBER}){_UNIT}")),
    ((" took ",),
     re.compile(rf"\b(?:[Ss]tep|[Ii]teration|[Bb]atch)(?: #?\d+)? took (?P<value>{_NUMBER}){_UNIT}")),
    (("/step", "/batch", "/iter"),
     re.compile(rf"(?<![\d.,])(?P<value>{_NUMBER}) ?(?P<unit>ms|s)(?:ec)?/(?:step|batch|iter)\b")),
    ((" ms |",),
     re.compile(rf"\| (?P<value>{_NUMBER}) (?P<unit>ms) \|")),
    (("  data: ",),
     re.compile(rf"\biter: +(?P<value>{_NUMBER}){_UNIT}(?=\s+data: )")),
    (("Batch (t)",),
     re.compile(rf"\bBatch \(t\){_IS}(?P<value>{_NUMBER}){_UNIT}")),
    (("ime", "dt"),
     re.compile(rf"(?<![\w/])(?<!total )(?<!wall )(?<!data )(?<!Data )(?<!training )(?:time|Time|dt|batch_time){_IS}"
                rf"(?P<value>{_NUMBER}){_UNIT}")),
)  # fmt: skip
"""Patterns of durations, each with literals; every match contains one of them."""
_OF_OTHERS = re.compile(r"(?:\beta|\bETA|elapsed|remaining|estimated|expected)[ _/-]\Z", re.IGNORECASE)
"""Words before the name of a duration that is not a step's, but the time since the start, or until the end."""
_OF_STEP = re.compile(
    r"per[_ ](?:iteration|step)|(?:[iI]ter(?:ation)?|[sS]tep)[_ ][tT]im|ime/step|s(?:ec)?/step| took "
)
"""Names of durations of a step, as opposed to the time since the start."""
_STEP_ALONE = re.compile(r"\b(?:[Ss]tep|[Ii]teration|[Bb]atch) took \d|\btrain_step_time\b")
"""Names of durations that are read on lines without a step number."""
_DATA = re.compile(
    rf"(?<![\w])(?:(?:load_)?data(?:[_ ]wait)?[_ ]times?|Data \(t\)|Data|time/data|data_loading_time|"
    rf"data(?:loading)?_s|(?<=batch: )iter_time|data(?=: +[\d.]+ +(?:max mem|lr)\b)){_IS}(?P<value>{_NUMBER}){_UNIT}"
)
_WITHOUT_DATA = re.compile(r"\b(?:updt_s|train_step_time)\b")
"""Durations that exclude the time for data, which is printed next to them."""
_KERAS = re.compile(r"^(?P<step>\d{1,9})/(?P<total>\d{1,9}) +(?:\[=*[>.]*\]|━+)")
"""Keras' bar of an epoch. It follows the line with the epoch's number, and its loss is the mean so far."""
_SPEED = re.compile(
    r"(?:train_speed\(iter/s\)|iterations?/sec|it/s|\bups|throughput/batches_per_sec)['\"]?\s*[:=]\s*" + _NUMBER
)
_SPEED_WORDS = ("it/s", "iter", "ups", "batches_per_sec")
_THROUGHPUT = re.compile(
    r"(?:\btps|\bwps|\btok(?:ens?)?/s(?:ec)?|tokens_per_second(?:_per_gpu)?|samples/sec|images/sec|CurrSamplesPerSec|"
    r"perf/throughput|[Tt]okens/s/device|\bRate(?==[\d.]+ GlobalRate))" + _IS + _NUMBER
)  # fmt: skip
_STEPS_PER_SECOND = re.compile(r"\bsteps/sec " + _NUMBER)
_SPEED_ENDS = ("s/s", "g/s", "k/s")
_SPEED_OF = re.compile(
    r"(?<![\w.])" + _NUMBER + r" *(?:samples|images|imgs?|tokens|tok|examples|frames|words|sentences)/s"
)
_PER_STEP = re.compile(
    r"(?<![\w.])\d[\d.]* ?m?s(?:ec)?/step\b(?<!eval)|\bstep_avg:\d|throughput/batches_per_sec: \d|"
    r"\bper (?:iteration|step)(?: \((?:ms|s)\))?" + _IS + r"\d|\| consumed samples: +\d"
)
_BATCH_ALONE = re.compile(r"\bEpoch ?\[\d{1,7}\][ ,:-]{1,4}Batch ?\[\d{1,12}\]")
"""MXNet's lines count batches within an epoch, and do not print the epoch's length."""
_RATE_WORDS = ("Rate=", "tps", "wps", "tok", "okens", "s/sec", "PerSec", "perf/throughput")
_SCALE = re.compile(r"[lL]oss[_ ]scale" + _IS + _NUMBER)
_SKIPPED = re.compile(r"number of skipped iterations: *(\d{1,12})")
_SKIPPED_SO_FAR = re.compile(r"\bskipped=(\d{1,12})")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """Values of a step on one line. `step` is None if the trainer prints no number (transformers); lines are counted
    then.
    """

    step: int | None
    loss: float | None
    grad_norm: float | None
    lr: float | None
    duration_ns: int | None
    data_ns: int | None = None
    is_of_step: bool = False
    """True if the line states that this is a step's duration, and thus not elapsed time even if it grows."""
    throughput: float | None = None
    """Tokens or samples per second."""
    skipped: int | None = None
    """Number of this line's steps that were skipped because of an overflow."""
    skipped_so_far: int | None = None
    loss_scale: float | None = None
    """The fp16 loss scale."""
    total: int | None = None
    """Total number of planned steps."""
    per_epoch: int | None = None
    """Steps per epoch, if the line counts within an epoch."""
    of_step: int | None = None
    """Number of the optimizer step, if `step` counts micro-batches (litgpt)."""
    bar: Bar | None = None
    epoch: float | None = None
    """Epoch on a line without a step number."""
    name: str = ""
    """Words before the loss on a line with an epoch but no step. They distinguish lines of batches from means of an
    epoch.
    """


def step_of(text: str) -> int | None:
    """Step number on a line, with or without values."""
    return _step(text)[0]


def heading_of(text: str) -> tuple[int, int | None] | None:
    """Return (step, last step) of a heading, after which values follow on indented lines."""
    if batch := _BATCH_HEADING.search(text):
        return (int(batch["epoch"]) - 1) * int(batch["total"]) + int(batch["step"]), None
    found = _HEADING.search(text)
    return (int(found["step"]), int(found["total"]) if found["total"] else None) if found else None


def epoch_heading_of(text: str) -> int | None:
    """Epoch of a line that states nothing else."""
    found = _EPOCH_HEADING.match(text)
    return int(found["epoch"]) if found else None


def read_step(
    text: str, heading: tuple[int, int | None] | None = None, epoch_above: int | None = None
) -> StepLine | None:
    """Read the step of a line; None if it has no values of a step. `heading`: from the line above an indented one.
    `epoch_above`: the epoch in the heading above.
    """
    if "train_runtime" in text or "Saving dict for global step" in text:
        return None  # a summary, by transformers at the end or by TensorFlow's Estimator after an evaluation
    if " train " in text and (columns := _COLUMNS.match(text)):
        return StepLine(step=int(columns["step"]), loss=float_of(columns[2]), grad_norm=None, lr=None, duration_ns=None)
    if "/" in text[:24] and (row := _ROW.match(text)):
        return StepLine(
            step=int(row["step"]), total=int(row["total"]), loss=_first_not_finite(row["values"].split()),
            grad_norm=None, lr=None, duration_ns=None,
        )  # fmt: skip
    bar = read_bar(text) if "it/s" in text or "s/it" in text else None
    # `str.find` takes a tenth of the time of a regex search: try a pattern only if the line has one of its literals.
    loss = _loss(text) if "oss" in text or "OSS" in text else None
    grad_norm = _GRAD_NORM.search(text) if "norm" in text else None
    step, total = heading or _step(text)
    skipped = _SKIPPED.search(text) if "skipped" in text else None
    so_far = _SKIPPED_SO_FAR.search(text) if "skipped=" in text else None
    rate = _THROUGHPUT.search(text) if any(word in text for word in _RATE_WORDS) else None
    rate = _SPEED_OF.search(text) if rate is None and any(end in text for end in _SPEED_ENDS) else rate
    keras = _KERAS.match(text.lstrip("\b ")) if "/" in text[:24] else None
    if keras is not None and (keras["step"] != keras["total"] or loss is None):
        return None
    is_alone = step is None and ("ook " in text or "step_time" in text) and _STEP_ALONE.search(text) is not None
    part = _part_of_loss(text) if loss is None and step is not None and "loss" in text else None
    part = _not_finite_before(text) if part is None and loss is None and bar is not None else part
    policy = _POLICY.findall(text) if part is None and loss is None and "{" in text and "loss/" in text else []
    part = (_first_not_finite(policy) or float_of(policy[0])) if policy else part
    is_batch = loss is None and " of epoch " in text and _batch(text) is not None
    # A step number alone is not enough: the line must have a value of the step.
    if loss is None and part is None and grad_norm is None and bar is None and (
        (step is None or (skipped is None and so_far is None and rate is None and not _PER_STEP.search(text)))
        and not (rate is not None and _BATCH_ALONE.search(text))
        and not is_alone
        and not is_batch
    ):  # fmt: skip
        return None
    is_counted = loss is not None and (("{" in text and "epoch" in text) or _SAMPLES.search(text) is not None)
    is_counted = is_counted or is_alone or keras is not None or bool(policy)
    if loss is not None and ("batch: iter_time" in text or ("TRAIN |" in text and "Batch " in text)):
        is_counted, step = True, None  # ESPnet and WeNet print only the batch's number within an epoch
    is_counted = is_counted or (rate is not None and step is None and _BATCH_ALONE.search(text) is not None)
    name = ""
    is_in_epoch = epoch_above is not None or _EPOCH.search(text) is not None
    if step is None and bar is None and not is_counted and loss is not None and is_in_epoch:
        is_counted, name = True, _words_before(text, loss)  # a hand-written loop's line: `Epoch 3 - Train Loss: 0.41`
    if step is None and bar is None and not is_counted:
        return None
    epoch = _EPOCH_OF.search(text) if is_counted else None
    throughput = _value(rate)
    duration_ns, data_ns = _duration_ns(text, bar), _data_ns(text)
    if duration_ns is not None and data_ns is not None and (data_ns > duration_ns or _WITHOUT_DATA.search(text)):
        duration_ns += data_ns
    return StepLine(
        step=None if is_counted and _SAMPLES.search(text) else step,
        loss=_value(loss) if loss is not None or part is None or math.isfinite(part) else part,
        grad_norm=_value(grad_norm),
        lr=_value(_RATE.search(text)) if "lr" in text or "rate" in text or "LR" in text else None,
        duration_ns=duration_ns,
        data_ns=data_ns,
        is_of_step=duration_ns is not None and _OF_STEP.search(text) is not None,
        throughput=throughput if throughput and math.isfinite(throughput) and throughput > 0 else None,
        skipped=int(skipped[1]) if skipped else None,
        skipped_so_far=int(so_far[1]) if so_far else None,
        loss_scale=_value(_SCALE.search(text)) if "scale" in text else None,
        total=total,
        per_epoch=_per_epoch(text),
        of_step=int(found[1]) if " step " in text and (found := _ITERATION.search(text)) else None,
        bar=bar,
        epoch=_value(epoch) if epoch or not is_counted else epoch_above,
        name=name,
    )


def _words_before(text: str, loss: re.Match[str]) -> str:
    """Words of a line before its loss, without numbers. They are the same for all lines of one print statement."""
    epoch = _EPOCH.search(text)
    begin = epoch.start() if epoch is not None and epoch.start() < loss.start() else 0
    return " ".join(re.findall(r"[A-Za-z]+", text[begin : loss.start()]))


def _loss(text: str) -> re.Match[str] | None:
    for match in _LOSS.finditer(text):
        begin = match.start()
        before = text[begin - 1 : begin]
        if match[1].lower() == "nan" and "reduced_train_loss" in text[match.end() :]:
            # Lightning prints NaN if it has no mean loss (XLA, pipelines). The true loss follows on NeMo's line as
            # `reduced_train_loss`.
            continue
        if not (before.isalnum() or before in ("_", "/", " ")) or not begin:
            return match
        if before == " " and _HELD_OUT.search(text, max(0, begin - _NAME_CHARS), begin - 1):
            continue
        if before == " " or _OF_LOSS.search(text, max(0, begin - _NAME_CHARS), begin):
            return match
    return None


def _part_of_loss(text: str) -> float | None:
    """A component of a training loss, preferably one that is not finite; None if there is none."""
    found = [one for one in _PART_OF_LOSS.finditer(text) if not any(map(_HELD_OUT.search, one["name"].split("_")))]
    values = [float_of(one["value"]) for one in found]
    return next((value for value in values if not math.isfinite(value)), values[0] if values else None)


def _not_finite_before(text: str) -> float | None:
    """The first non-finite loss in the columns before a bar; None if all are finite."""
    found = _UNDER_BAR.search(text) if "nan " in text or "inf " in text else None
    return _first_not_finite(found["values"].split()) if found else None


def _first_not_finite(values: Iterable[str]) -> float | None:
    return next((value for value in map(float_of, values) if not math.isfinite(value)), None)


def _step(text: str) -> tuple[int | None, int | None]:
    if ("poch" in text or "Train: " in text) and (found := _IN_EPOCH.search(text)):
        epoch = int(found["epoch"] or found["timm"]) - (found["timm"] is None and found["zero"] is None)
        return max(epoch, 0) * int(found["total"]) + int(found["step"]), None
    if "poch" in text and ("/" in text or " of " in text) and (found := _batch(text)):
        return int(found["epoch"]) * int(found["total"]) + int(found["step"]), None
    for word, pattern in _STEPS:
        if (word in text if word else _STEP_WORD.search(text)) and (found := pattern.search(text)):
            if word == "] " and _HELD_OUT.search(text[: found.start()].rstrip(": ")):
                return None, None  # a line of a test, not of training, as torchvision's reference scripts print it
            total = found.groupdict().get("total")
            return int(found["step"]), int(total) if total else None
    return None, None


def _batch(text: str) -> re.Match[str] | None:
    found = _BATCH_OF.search(text) if " of " in text else None
    is_training = found is not None and _HELD_OUT.search(text[: found.start()].rstrip(": ")) is None
    return found if is_training else _BATCH.search(text)


def _per_epoch(text: str) -> int | None:
    if "poch" not in text and "Train: " not in text:
        return None
    found = _IN_EPOCH.search(text) or _batch(text)
    return int(found["total"]) if found else None


def _duration_ns(text: str, bar: Bar | None) -> int | None:
    for words, pattern in _TIMES:
        if not any(word in text for word in words):
            continue
        for match in pattern.finditer(text):
            begin = match.start()
            is_named = begin < match.start("value")  # False for `5.2 s/step`, because the unit says what the number is
            if is_named and _OF_OTHERS.search(text, max(0, begin - _NAME_CHARS), begin):
                continue
            if found := _in_ns(match):
                return found
    speed = _SPEED.search(text) if any(word in text for word in _SPEED_WORDS) else None
    speed = speed or (_STEPS_PER_SECOND.search(text) if "steps/sec" in text else None)
    rate = float_of(speed[1]) if speed else 0.0
    if 1e-6 < rate < 1e6:
        return int(1e9 / rate)
    return bar.duration_ns if bar else None


def _data_ns(text: str) -> int | None:
    match = _DATA.search(text) if "ata" in text or "batch: iter_time" in text else None
    return _in_ns(match, least=-1.0) if match else None


def _in_ns(match: re.Match[str], least: float = 0.0) -> int | None:
    unit = match.groupdict().get("in") or match["unit"] or "s"
    scale = {"K": 1e3, "M": 1e6}.get(match.groupdict().get("scale") or "", 1)
    value = scale * float_of(match["value"]) * {"ms": 1e6, "us": 1e3, "s": 1e9}[unit]
    return int(value) if least < value < 1e15 else None


def _value(match: re.Match[str] | None) -> float | None:
    return float_of(match[1]) if match else None
