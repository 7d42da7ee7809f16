"""The page of estimates: a form for a model or a script, and below it the answer, which has its own link."""

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
from ullage.manager.page.charts import use_charts
from ullage.manager.page.elements import box, button, card, choice, number_field, problem, text_field, toggle, words
from ullage.manager.page.readings import DaemonReading
from ullage.manager.page.sessions import Session
from ullage.text import plain

_LOOK = 0.5  # seconds between two checks of a running estimate
_PAUSE = 0.7  # seconds from the last change of the form to a new estimate
_MOST_NAMES = 30  # most suggested names
_LARGEST_SCRIPT = 128 << 10  # bytes; a browser sends it in one message
_SOURCES = ("torchvision", "timm", "hf")
# GPUs compared with the chosen one: few of each kind, so that the table does not take long.
_OTHERS = (
    "T4",
    "L4",
    "A10G",
    "V100-16GB",
    "RTX-3090",
    "RTX-4090",
    "RTX-5090",
    "A30",
    "A40",
    "L40S",
    "A100-40GB",
    "A100-80GB",
    "H100-80GB",
    "H200",
    "B200",
)
_BATCH_ARGUMENT = re.compile(r"--[\w-]*batch[-_]?size\b")  # usual names in scripts
# The browser reads the file into the text field; its name is only shown.
_READ_FILE = (
    "async event => { const file = event.target.files[0]; if (file) "
    f"emit(file.name.slice(0, 200), file.size > {_LARGEST_SCRIPT} ? null : await file.text()); }}"
)


class EstimateForm:
    """The fields of a question; it calls `changed` when one of them changes."""

    def __init__(self, changed: Any) -> None:
        names = [each.name for each in all_gpus() if not each.is_mig]
        self.kind = toggle("What", ("model", "script"), "model")
        with box("div", "fields") as self._of_model:
            self.model = text_field("Model", "torchvision:resnet50", "long")
            self._offered = box("datalist")
            self._offered.props["id"] = f"{self.model.html_id}-datalist"  # the id that NiceGUI's field uses
            figures: dict[str, Any] = {
                "batch_size": number_field("Batch size", value=32),
                "sequence_length": number_field("Sequence length", "of the model"),
                "precision": choice("Precision", {"": "the usual", **{name: name for name in PRECISIONS}}, ""),
                "optimizer": choice("Optimizer", [*OPTIMIZERS], "adamw"),
                "checkpointing": ui.checkbox("Activation checkpointing"),
            }
            with box("details", "long") as self._more:
                words("summary", "More")
                with box("div", "fields"):
                    rare = {
                        "input_shape": text_field("Shape of a sample", "3,224,224"),
                        "gradient_accumulation": number_field("Batches for each step", "1"),
                        "lora": number_field("LoRA rank", "no LoRA"),
                        "quantize": choice("Quantization", {"": "none", **{name: name for name in QUANTIZATIONS}}, ""),
                    }
                    config = _text_of_file("Config", "Config for hf:CLASS (JSON)", ".json,application/json")
        self._model, self._rare = figures | rare | {"config": config}, (*rare, "config")
        with box("div", "fields") as self._of_script:
            self.script = _text_of_file("Script", "Text of the script", ".py,text/x-python")
            self.args = text_field("Arguments", "--batch-size 64", "long")
            self.batch_arg = text_field("Its argument for a batch", "--batch-size, if it has one")
            self._ranks = number_field("GPUs (ranks)", "as it is started")
            self._places = {
                "cwd": text_field("Folder on the host", "/home/you/project"),
                "venv": text_field("Virtual environment", "/home/you/venv"),
            }
        self._script = {"world_size": self._ranks, "batch_arg": self.batch_arg}
        with box("div", "fields"):
            self.gpu = ui.select(names, value="A100-40GB", label="GPU", with_input=True).props("outlined dense")
        self.kind.on_value_change(self._switch)
        self.model.on_value_change(self._offer)
        self.script.on_value_change(self._guess)
        for field in (*figures.values(), *rare.values(), self.gpu):
            field.on_value_change(changed)
        self._names = [f"{source}:{name}" for source in _SOURCES for name in model_names(source)]
        self._switch()

    def _switch(self) -> None:
        self._of_model.set_visibility(self.kind.value == "model")
        self._of_script.set_visibility(self.kind.value == "script")

    def _guess(self) -> None:
        """Guess the script's argument for the batch size, unless it is set."""
        match = _BATCH_ARGUMENT.search(str(self.script.value or ""))
        if match and not self.batch_arg.value:
            self.batch_arg.set_value(match[0])

    def _offer(self) -> None:
        begun = str(self.model.value or "").strip().casefold()
        matching = [name for name in self._names if name.casefold().startswith(begun)] if begun else []
        matching += [name for name in self._names if begun and begun in name.casefold() and name not in matching]
        self._offered.clear()
        with self._offered:
            for name in matching[:_MOST_NAMES]:
                box("option").props["value"] = name

    @property
    def question(self) -> dict[str, Any]:
        """Return the question (`EstimateSpec`)."""
        if self.kind.value == "script":
            try:
                args = shlex.split(self.args.value or "")
            except ValueError as error:
                raise InvalidValue(f"the arguments cannot be read: {error}") from None
            if not (self.script.value or "").strip():
                raise InvalidValue("a script must be given: choose a file, or paste its text")
            options = _given(self._script)
            return {"script": self.script.value, "args": args, "options": options, **self._gpu, **_given(self._places)}
        if not (self.model.value or "").strip():
            raise InvalidValue("the name of a model must be given, such as torchvision:resnet50")
        options = _given(self._model)
        if "input_shape" in options:
            options["input_shape"] = parse_shape(options["input_shape"], "the shape of a sample")
        if "config" in options:
            options["config"] = _config(options["config"])
        return {"model": self.model.value.strip(), "options": options, **self._gpu}

    @property
    def _gpu(self) -> dict[str, Any]:
        return {"gpu": [self.gpu.value]}

    def fill(self, question: dict[str, Any]) -> None:
        self.kind.set_value("model" if "model" in question else "script")
        options = question.get("options", {})
        shape, config = options.get("input_shape"), options.get("config")
        shown = options | {"input_shape": ",".join(map(str, shape or ()))}
        shown |= {"config": json.dumps(config, indent=2) if isinstance(config, dict) else ""}
        for name, field in {**self._model, **self._script}.items():
            _fill(field, shown.get(name))
        for name, field in self._places.items():
            _fill(field, question.get(name))
        if any(options.get(name) for name in self._rare):
            self._more.props["open"] = True
        self.model.set_value(plain(question.get("model", "")))
        self.script.set_value(question.get("script", ""))
        self.args.set_value(shlex.join(map(plain, question.get("args", []))))
        gpu = next(iter(question.get("gpu", [])), None)
        if gpu in self.gpu.options:
            self.gpu.set_value(gpu)


def _fill(field: Any, value: Any) -> None:
    """Show a value in a field, if the field can hold it."""
    if isinstance(field, ui.checkbox):
        field.set_value(value is True)
    elif isinstance(field, ui.number):
        field.set_value(value)
    elif not isinstance(field, ui.select):
        field.set_value(plain(str(value or "")))
    elif value in field.options:
        field.set_value(value)


def _text_of_file(name: str, label: str, kinds: str) -> ui.textarea:
    def read(event: GenericEventArguments) -> None:
        file, text = event.args
        if text is None:
            file_name.set_text(f"{plain(str(file))} is too large: at most 128 KiB")
        else:
            file_name.set_text(plain(str(file)))
            made.set_value(str(text)[:_LARGEST_SCRIPT])

    with box("label", "file long"):
        words("span", name)
        chooser = box("input").props(f'type="file" accept="{kinds}" aria-label="A file of this computer: {name}"')
        chooser.on("change", read, js_handler=_READ_FILE)
        file_name = words("span", "", "figures")
    made = ui.textarea(label).props(f"outlined dense spellcheck=false maxlength={_LARGEST_SCRIPT}")
    return made.classes("long code")


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, field in fields.items():
        value = field.value.strip() if isinstance(field.value, str) else field.value
        if value:
            values[name] = int(value) if isinstance(value, float) else value
    return values


def _config(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InvalidValue(f"the config must be JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidValue('the config must be names and values, such as {"n_layer": 12}, got something else')
    return values


class EstimatePage:
    """Requests the form's estimate, shows its progress and its answer; with a number, shows an earlier estimate."""

    def __init__(self, session: Session, number: str | None = None) -> None:
        use_charts()
        self._session, self._number = session, number
        self._question: dict[str, Any] | None = None  # the form's content at the last request
        self._changes, self._may = 0, True
        self._is_new = number is None
        with box("div", "columns wide-right"):
            with box("form", "card form") as form:
                self._form = EstimateForm(self._changed)
                with box("div", "tools"):
                    self._ask_button = button("Estimate", None, "main")
                    self._stop_button = button("Cancel", self._stop, "quiet cancel")
                self._status = words("p", "", "figures").props('role="status"')
                self._problem = problem()
            form.on("submit.prevent", lambda: self._ask())
            self._result = box("div")
        self._timer = ui.timer(_LOOK, self._look, active=number is not None)
        self._stop_button.set_visibility(False)

    async def refresh(self, reading: DaemonReading) -> None:
        """Update the default GPU, and whether this user may request estimates."""
        own = [gpu["name"] for gpu in reading.gpus if gpu["name"] in self._form.gpu.options]
        if self._is_new and self._question is None and own:
            self._is_new = False
            self._form.gpu.set_value(own[0])
        self._may = reading.about["scope"] != "read"
        self._ask_button.set_visibility(self._may)
        if not self._may:
            self._status.set_text("Your token allows to read; to ask for an estimate, it needs the scope submit.")

    async def _changed(self) -> None:
        """Estimate again after a change of the form, if a model was estimated before."""
        self._changes += 1
        change = self._changes
        await asyncio.sleep(_PAUSE)
        if self._question is None or "model" not in self._question or change != self._changes:
            return
        try:
            if self._form.question != self._question:
                await self._ask()
        except InvalidValue:
            pass  # a field is empty: the next click reports it

    async def _ask(self, **more: Any) -> None:
        if not self._may:
            return
        await self._stop()
        try:
            self._question = self._form.question
            self._show_status(await self._session.questions.ask({**self._question, **more}))
        except UllageError as error:
            self._problem.set_text(plain(str(error)))

    async def _stop(self) -> None:
        if self._timer.active and self._number is not None:
            self._timer.deactivate()
            try:
                await self._session.questions.give_up(self._number)
                self._status.set_text("Cancelled.")
            except UllageError:
                pass  # it has already ended
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
            return  # the timer tries again
        except UllageError as error:
            self._timer.deactivate()
            self._problem.set_text(plain(str(error)))
            return
        if self._question is None:
            self._fill(answer["question"])
        if self._timer.active:  # not cancelled meanwhile
            self._show_status(answer)

    def _fill(self, question: dict[str, Any]) -> None:
        """Show the question in the form, once."""
        self._question = question
        if "model" in question or "script" in question:
            self._form.fill(question)
            self._question = self._form.question

    def _show(self, answer: dict[str, Any]) -> None:
        self._result.clear()
        ui.navigate.history.replace(f"/estimate/{answer['id']}")
        with self._result:
            if answer["state"] == "failed":
                with card().props('role="alert"'):
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
                    gpus = list(dict.fromkeys([estimates[0].gpu, *_OTHERS]))
                    button("Compare with other GPUs", lambda: self._ask(gpu=gpus))
                question, fits = answer["question"], estimates[0].fits
                of_batch = "model" in question or "batch_arg" in question.get("options", {})
                if self._may and answer.get("advice") is None and (of_batch or "script" in question and not fits):
                    what = "How large can the batch be?" if fits else "What would make it fit?"
                    button(what, lambda: self._ask(advice=True))
            show_answer(estimates, answer.get("advice"))
