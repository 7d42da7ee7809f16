"""The page of estimates: a form for a model or a script, and the answer below it, which has a link of its own."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments

from ullage.errors import InvalidValue, NoDaemon, UllageError
from ullage.hardware import gpus as all_gpus
from ullage.jobs.model import PRECISIONS, QUANTIZATIONS, parse_shape
from ullage.jobs.optimizers import OPTIMIZERS
from ullage.jobs.sources.names import model_names
from ullage.manager.page.answer import read_estimates, show_answer
from ullage.manager.page.elements import box, words
from ullage.manager.page.frame import Frame
from ullage.manager.page.readings import DaemonReading
from ullage.manager.page.sessions import Session
from ullage.text import plain

_LOOK = 0.5  # seconds between two looks at an estimate that is under way
_PAUSE = 0.7  # seconds after the last change of the form, until it is estimated anew
_MOST_NAMES = 30  # that are offered
_LARGEST_SCRIPT = 128 << 10  # bytes; a browser sends it in one message
_SOURCES = ("torchvision", "timm", "hf")
# GPUs that a question is asked about beside the chosen one: few of each kind, so that the table answers in time.
_OTHERS = ("T4", "L4", "A10G", "V100-16GB", "RTX-3090", "RTX-4090", "RTX-5090", "A30", "A40", "L40S", "A100-40GB",
           "A100-80GB", "H100-80GB", "H200", "B200")  # fmt: skip
_BATCH_ARGUMENT = re.compile(r"--[\w-]*batch[-_]?size\b")  # as scripts call theirs
# The file is read in the browser: it goes into the text field, and its name is only shown.
_READ_FILE = (
    "async event => { const file = event.target.files[0]; if (file) "
    f"emit(file.name.slice(0, 200), file.size > {_LARGEST_SCRIPT} ? null : await file.text()); }}"
)


def show_estimate(session: Session, number: str | None = None) -> None:
    """Build the page; with a number, the answer of that estimate is on it."""
    frame = Frame(session, "Estimate", "/estimate")
    with frame.main:
        page = EstimatePage(session, number)
    frame.every_reading(page.refresh)


class EstimateForm:
    """The fields, and the question that they make. `changed` is called when a figure of the form is another one."""

    def __init__(self, changed: Any) -> None:
        names = [card.name for card in all_gpus() if not card.is_mig]
        self.kind = ui.toggle(["model", "script"], value="model").props('no-caps unelevated aria-label="What"')
        with box("div", "fields") as self._of_model:
            self.model = ui.input("Model", placeholder="torchvision:resnet50").props(
                "outlined dense stack-label spellcheck=false autocomplete=off"
            ).classes("long")  # fmt: skip
            self._offered = box("datalist")
            self._offered.props["id"] = f"{self.model.html_id}-datalist"  # where NiceGUI's field looks for it
            self.batch = _whole_number("Batch size", value=32)
            self.length = _whole_number("Sequence length", "of the model")
            self.precision = ui.select(
                {"": "the usual", **{name: name for name in PRECISIONS}}, value="", label="Precision"
            ).props("outlined dense")
            self.optimizer = ui.select([*OPTIMIZERS], value="adamw", label="Optimizer").props("outlined dense")
            self.checkpointing = ui.checkbox("Activation checkpointing")
            with box("details", "long") as self._more:
                words("summary", "More")
                with box("div", "fields"):
                    self.shape = ui.input("Shape of a sample", placeholder="3,224,224").props(
                        "outlined dense stack-label"
                    )
                    self.accumulation = _whole_number("Batches for each step", "1")
                    self.lora = _whole_number("LoRA rank", "no LoRA")
                    self.quantize = ui.select(
                        {"": "none", **{name: name for name in QUANTIZATIONS}}, value="", label="Quantization"
                    ).props("outlined dense")
                    self.config = _text_of_file("Config", "Config for hf:CLASS (JSON)", ".json,application/json")
        with box("div", "fields") as self._of_script:
            self.script = _text_of_file("Script", "Text of the script", ".py,text/x-python")
            self.args = (
                ui.input("Arguments", placeholder="--batch-size 64").props("outlined dense stack-label").classes("long")
            )
            self.batch_arg = ui.input("Its argument for a batch", placeholder="--batch-size, if it has one").props(
                "outlined dense stack-label spellcheck=false"
            )
            self.ranks = _whole_number("GPUs (ranks)", "as it is started")
            self.folder = ui.input("Folder on the server", placeholder="/home/you/project").props(
                "outlined dense stack-label"
            )
            self.venv = ui.input("Virtual environment", placeholder="/home/you/venv").props(
                "outlined dense stack-label"
            )
        with box("div", "fields"):
            self.gpu = ui.select(names, value="A100-40GB", label="GPU", with_input=True).props("outlined dense")
        self.kind.on_value_change(self._switch)
        self.model.on_value_change(self._offer)
        self.script.on_value_change(self._guess)
        for field in (self.batch, self.length, self.precision, self.optimizer, self.checkpointing, self.shape,
                      self.accumulation, self.lora, self.quantize, self.gpu):  # fmt: skip
            field.on_value_change(changed)
        self._names = [f"{source}:{name}" for source in _SOURCES for name in model_names(source)]
        self._switch()

    def _switch(self) -> None:
        self._of_model.set_visibility(self.kind.value == "model")
        self._of_script.set_visibility(self.kind.value == "script")

    def _guess(self) -> None:
        """Which argument of the script is its batch size, unless somebody has said it."""
        found = _BATCH_ARGUMENT.search(str(self.script.value or ""))
        if found and not self.batch_arg.value:
            self.batch_arg.set_value(found[0])

    def _offer(self) -> None:
        """Offer names that go on as was typed, then names that have it in them."""
        begun = str(self.model.value or "").strip().casefold()
        found = [name for name in self._names if name.casefold().startswith(begun)] if begun else []
        found += [name for name in self._names if begun and begun in name.casefold() and name not in found]
        self._offered.clear()
        with self._offered:
            for name in found[:_MOST_NAMES]:
                box("option").props["value"] = name

    @property
    def question(self) -> dict[str, Any]:
        """What is asked (`EstimateSpec`)."""
        common: dict[str, Any] = {"gpu": [self.gpu.value]}
        if self.kind.value == "script":
            try:
                args = shlex.split(self.args.value or "")
            except ValueError as error:
                raise InvalidValue(f"the arguments cannot be read: {error}") from None
            if not (self.script.value or "").strip():
                raise InvalidValue("needed a script: choose a file, or paste its text")
            places = _given({"cwd": self.folder.value, "venv": self.venv.value})
            options = _given({"world_size": self.ranks.value, "batch_arg": self.batch_arg.value})
            return {"script": self.script.value, "args": args, "options": options, **common, **places}
        if not (self.model.value or "").strip():
            raise InvalidValue("needed the name of a model, such as torchvision:resnet50")
        options = {"batch_size": self.batch.value, "sequence_length": self.length.value,
                   "precision": self.precision.value, "optimizer": self.optimizer.value,
                   "checkpointing": self.checkpointing.value, "input_shape": self._sample_shape(),
                   "gradient_accumulation": self.accumulation.value, "lora": self.lora.value,
                   "quantize": self.quantize.value, "config": _config(self.config.value or "")}  # fmt: skip
        return {"model": self.model.value.strip(), "options": _given(options), **common}

    def _sample_shape(self) -> list[int]:
        text = (self.shape.value or "").strip()
        return parse_shape(text, "the shape of a sample") if text else []

    def fill(self, question: dict[str, Any]) -> None:
        """Show a question that was asked before; what is not told of it, and what the form cannot say, stays away."""
        self.kind.set_value("model" if "model" in question else "script")
        options = question.get("options", {})
        self.model.set_value(plain(question.get("model", "")))
        self.batch.set_value(options.get("batch_size"))
        self.length.set_value(options.get("sequence_length"))
        self.shape.set_value(",".join(map(str, options.get("input_shape") or ())))
        self.accumulation.set_value(options.get("gradient_accumulation"))
        self.lora.set_value(options.get("lora"))
        config = options.get("config")
        self.config.set_value(json.dumps(config, indent=2) if isinstance(config, dict) else "")
        self.ranks.set_value(options.get("world_size"))
        self.batch_arg.set_value(plain(str(options.get("batch_arg", ""))))
        if any(options.get(name) for name in ("input_shape", "gradient_accumulation", "lora", "quantize", "config")):
            self._more.props["open"] = True
        for field, name, default in ((self.precision, "precision", ""), (self.optimizer, "optimizer", "adamw"),
                                     (self.quantize, "quantize", "")):  # fmt: skip
            value = options.get(name, default)
            field.set_value(value if value in field.options else default)
        self.checkpointing.set_value(options.get("checkpointing") is True)
        self.script.set_value(question.get("script", ""))
        self.args.set_value(shlex.join(map(plain, question.get("args", []))))
        self.folder.set_value(plain(question.get("cwd", "")))
        self.venv.set_value(plain(question.get("venv", "")))
        gpu = next(iter(question.get("gpu", [])), None)
        if gpu in self.gpu.options:
            self.gpu.set_value(gpu)


def _whole_number(label: str, unsaid: str = "", value: int | None = None) -> ui.number:
    """A field for a number from 1 on; `unsaid` says what holds without one."""
    made = ui.number(label, value=value, min=1, precision=0, format="%d").props("outlined dense stack-label")
    if unsaid:
        made.props["placeholder"] = unsaid
    return made


def _text_of_file(name: str, label: str, kinds: str) -> ui.textarea:
    """A field for a text, and above it a button for a file of this computer that has it."""

    def read(event: GenericEventArguments) -> None:
        file, text = event.args
        if text is None:
            said.set_text(f"{plain(str(file))} is too large: at most 128 KiB")
        else:
            said.set_text(plain(str(file)))
            made.set_value(str(text)[:_LARGEST_SCRIPT])

    with box("label", "file long"):
        words("span", name)
        chooser = box("input").props(f'type="file" accept="{kinds}" aria-label="A file of this computer: {name}"')
        chooser.on("change", read, js_handler=_READ_FILE)
        said = words("span", "", "figures")
    made = ui.textarea(label).props(f"outlined dense spellcheck=false maxlength={_LARGEST_SCRIPT}")
    return made.classes("long code")


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """What was filled in, with whole numbers as such.

    >>> _given({"batch_size": 8.0, "lora": None, "cwd": " /tmp ", "precision": ""})
    {'batch_size': 8, 'cwd': '/tmp'}
    """
    found = {name: value.strip() if isinstance(value, str) else value for name, value in values.items()}
    return {name: int(value) if isinstance(value, float) else value for name, value in found.items() if value}


def _config(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidValue(f"the config is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidValue('needed a config with names and values, such as {"n_layer": 12}; found something else')
    return found


class EstimatePage:
    """Asks what the form says, follows the estimate, and shows the answer."""

    def __init__(self, session: Session, number: str | None) -> None:
        self._session, self._number = session, number
        self._asked: dict[str, Any] | None = None  # what the form said when an answer was asked for last
        self._changes, self._may = 0, True
        self._is_new = number is None
        with box("div", "columns wide-right"):
            with box("form", "card form") as form:
                self._form = EstimateForm(self._changed)
                with box("div", "tools"):
                    self._ask_button = words("button", "Estimate", "main").props('type="submit"')
                    self._stop_button = words("button", "Cancel", "quiet cancel").props('type="button"')
                self._status = words("p", "", "figures").props('role="status"')
                self._problem = words("p", "", "problem").props('role="alert"')
            form.on("submit.prevent", lambda: self._ask())
            self._stop_button.on("click", self._stop)
            with box("div") as self._result:
                pass
        self._timer = ui.timer(_LOOK, self._look, active=number is not None)
        self._stop_button.set_visibility(False)

    async def refresh(self, reading: DaemonReading) -> None:
        """What the daemon's GPUs are, and whether this user may ask."""
        own = [gpu["name"] for gpu in reading.gpus if gpu["name"] in self._form.gpu.options]
        if self._is_new and self._asked is None and own:
            self._is_new = False
            self._form.gpu.set_value(own[0])
        self._may = reading.about["scope"] != "read"
        self._ask_button.set_visibility(self._may)
        if not self._may:
            self._status.set_text("Your token allows to read; to ask for an estimate, it needs the scope submit.")

    async def _changed(self) -> None:
        """After the first answer, the form is live: a changed figure is estimated anew."""
        self._changes += 1
        change = self._changes
        await asyncio.sleep(_PAUSE)
        if self._asked is None or "model" not in self._asked or change != self._changes:
            return
        try:
            if self._form.question != self._asked:
                await self._ask()
        except InvalidValue:
            pass  # a field was emptied: it is said when it is asked for

    async def _ask(self, **more: Any) -> None:
        if not self._may:
            return
        await self._stop()
        try:
            self._asked = self._form.question
            self._show_status(await self._session.questions.ask({**self._asked, **more}))
        except UllageError as error:
            self._problem.set_text(plain(str(error)))

    async def _stop(self) -> None:
        """Give up the estimate that is under way."""
        if self._timer.active and self._number is not None:
            self._timer.deactivate()
            try:
                await self._session.questions.give_up(self._number)
                self._status.set_text("Cancelled.")
            except UllageError:
                pass  # it is over already
            self._stop_button.set_visibility(False)

    def _show_status(self, answer: dict[str, Any]) -> None:
        self._number = answer["id"]
        self._problem.set_text("")
        waits = answer["state"] == "waiting"
        self._status.set_text(f"It {answer['reason'] or 'waits'}." if waits else "")
        self._stop_button.set_visibility(waits and self._may)
        self._timer.active = waits
        if not waits:
            self._show(answer)

    async def _look(self) -> None:
        try:
            answer = await self._session.questions.look(str(self._number))
        except NoDaemon:
            return  # it is asked again
        except UllageError as error:
            self._timer.deactivate()
            self._problem.set_text(plain(str(error)))
            return
        if self._asked is None:
            self._fill(answer["question"])
        if self._timer.active:  # it was not given up meanwhile
            self._show_status(answer)

    def _fill(self, question: dict[str, Any]) -> None:
        """Show what was asked, once; of another user's script there is nothing to show."""
        self._asked = question
        if "model" in question or "script" in question:
            self._form.fill(question)
            self._asked = self._form.question

    def _show(self, answer: dict[str, Any]) -> None:
        self._result.clear()
        ui.navigate.history.replace(f"/estimate/{answer['id']}")
        with self._result:
            if answer["state"] == "failed":
                with box("section", "card").props('role="alert"'):
                    words("h2", "There is no estimate", "verdict bad")
                    words("p", f"{plain(str(answer['reason']))}", "told")
                return
            try:
                estimates = read_estimates(answer)
            except InvalidValue as error:
                self._problem.set_text(str(error))
                return
            with box("div", "tools"):
                ui.link("Link to this answer", f"/estimate/{answer['id']}")
                if self._may and len(estimates) == 1:
                    self._button("Compare with other GPUs", gpu=list(dict.fromkeys([estimates[0].gpu, *_OTHERS])))
                asked, fits = answer["question"], estimates[0].fits
                of_batch = "model" in asked or "batch_arg" in asked.get("options", {})
                if self._may and answer.get("advice") is None and (of_batch or "script" in asked and not fits):
                    what = "How large can the batch be?" if fits else "What would make it fit?"
                    self._button(what, advice=True)
            show_answer(estimates, answer.get("advice"))

    def _button(self, text: str, **more: Any) -> None:
        words("button", text, "quiet").props('type="button"').on("click", lambda: self._ask(**more))
