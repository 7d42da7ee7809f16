"""Messages for scripts that could not be estimated, with advice."""

import re
import runpy
import shlex
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from ullage.units import format_duration

_DATA_ERRORS = ("FileNotFoundError", "NotADirectoryError", "DatasetNotFoundError", "LocalEntryNotFoundError")
_NETWORK_ERRORS = ("URLError", "gaierror", "MaxRetryError", "NameResolutionError", "OfflineModeIsEnabled")
_NETWORK_WORDS = re.compile(
    "urlopen error|connection|network|offline|resolve|couldn't reach|can't load|max retries|name resolution|"
    "name or service not known"
)
_DATA_WORDS = re.compile(
    "dataset not found|not found or corrupted|couldn't find any|found no valid file|no such file|no file named"
)
_LONGEST = 500  # characters of an exception's text; all of it is in the script's output
_ASKS_DRIVER = re.compile(r"nvidia-smi|NVML|libnvidia|libcuda\b|NVIDIA driver", re.I)
_NO_OPERATOR = re.compile(r"'_OpNamespace' '(\w+)' object has no attribute '(\w+)'")
_OTHER_NAMES = (  # of packages for pip
    "cv2=opencv-python sklearn=scikit-learn skimage=scikit-image PIL=pillow yaml=pyyaml dotenv=python-dotenv "
    "hydra=hydra-core ignite=pytorch-ignite git=gitpython patoolib=patool skvideo=scikit-video umap=umap-learn "
    "pkg_resources=setuptools"
)
_COMPILED_FOR_GPUS = ("flash_attn", "flash_attn_interface", "apex", "mamba_ssm", "causal_conv1d", "transformer_engine")
_LACKS_CUDA = re.compile(r"lib(c10_cuda|torch_cuda|cu\w+|nv\w+)[-\w.]*\.so|undefined symbol: \w*(cuda|c10)", re.I)
_ABOUT_GPUS = re.compile(r"cuda|gpus?\b|nvidia|nvml", re.I)  # errors that may not occur on a machine with other GPUs
_ASKS_FOR_GPUS = re.compile(r"requested gpu: \[[\d, ]*?(\d+)\]", re.I)  # Lightning, with the numbers of those GPUs
_OTHER_VERSION = re.compile(
    r"unexpected keyword argument|cannot import name|has no attribute|positional argument|Weights only load"
)
_REFUSED_SIZES = re.compile(
    r"shape '.*' is invalid for input of size|size of tensor a .* must match the size|shapes cannot be multiplied"
)
_ENVIRONMENT = {"distributed", "_dynamo", "_inductor", "cuda", "backends", "cpp_extension.py"}  # parts of PyTorch
_RUNPY = (runpy.__file__, "<frozen runpy>")
_PACKAGE = f"{Path(__file__).parents[2]}/"  # Ullage's own files


def as_user_sees(error: BaseException) -> BaseException:
    """Return an exception with the traceback that it would have without Ullage.

    It begins with the first line of the user's code. If Ullage raised the exception on purpose, it also ends there: the
    frames of Ullage and PyTorch below are left out.
    """
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    if _kind(error) in ("out of memory", "unsupported") and frames and _file(frames[-1]).startswith(_PACKAGE):
        while frames and (_file(frames[-1]).startswith(_PACKAGE) or "torch" in _file(frames[-1]).split("/")):
            frames.pop()
    while frames and _file(frames[0]).startswith((_PACKAGE, *_RUNPY)):
        frames.pop(0)
    shown: TracebackType | None = None
    for frame in reversed(frames):
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return error.with_traceback(shown)


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename


_IN_WORKER = "in DataLoader worker process"  # PyTorch puts the traceback of such a failure into the message


def describe(error: BaseException) -> dict[str, Any]:
    """Return an exception as plain values, for the answer of the child process."""
    frames = traceback.extract_tb(error.__traceback__)
    name = type(error).__name__
    cause = error
    chain = [name]
    while cause.__cause__ is not None or cause.__context__ is not None:
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        chain.append(type(cause).__name__)
    lines = "".join(traceback.format_exception_only(error)).strip()
    if _IN_WORKER in lines:
        lines = f"{lines.splitlines()[-1]} (in a worker of a DataLoader)"
    if isinstance(error, SyntaxError):
        return {
            "kind": "syntax",
            "message": error.msg,
            "file": error.filename,
            "line": error.lineno,
            "text": error.text,
        }
    return {
        "kind": _kind(error),
        "type": name,
        "chain": chain,
        "message": lines,
        "missing": getattr(error, "name", None) if isinstance(error, ImportError) else None,
        "without": _package_without(error),
        "key": str(error.args[0]) if isinstance(error, KeyError) and error.args else None,
        **_place(frames),
        "of_script": _is_of_script(error, frames),
        "of_gpu": bool(_ABOUT_GPUS.search(f"{frames[-1].line if frames else ''} {error}")),
        "program": _missing_program(error, frames),
        "of_library": bool(frames) and _is_library(frames[-1].filename),
        "absent": isinstance(error, FileNotFoundError | NotADirectoryError) and bool(error.filename),
    }


def _package_without(error: BaseException) -> dict[str, str] | None:
    """Return the release or the folder of an installed package that lacks an imported name."""
    package, dot, _ = (getattr(error, "name", None) or "").partition(".")
    module = sys.modules.get(package)
    lacks_module = isinstance(error, ModuleNotFoundError) and dot
    if module is None or not (lacks_module or isinstance(error, ImportError) and "cannot import name" in str(error)):
        return None
    folder = next(iter(getattr(module, "__path__", [])), "")
    version = getattr(module, "__version__", None) if _is_library(folder) else None
    return {"release": f"{package} {version}"} if isinstance(version, str) else {"folder": folder}


def where_now() -> dict[str, Any]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _place(traceback.extract_stack(frame))


def _place(frames: traceback.StackSummary) -> dict[str, Any]:
    of_user = [frame for frame in frames if not frame.filename.startswith(_PACKAGE) and not _is_library(frame.filename)]
    if not of_user:
        return {"file": None, "line": None, "text": None}
    return {"file": of_user[-1].filename, "line": of_user[-1].lineno, "text": of_user[-1].line}


def _missing_program(error: BaseException, frames: traceback.StackSummary) -> str | None:
    """Return the program that the script wanted to start and that does not exist."""
    started = bool(frames) and Path(frames[-1].filename).name == "subprocess.py"
    return str(error.filename) if started and isinstance(error, FileNotFoundError) else None


def _is_of_script(error: BaseException, frames: traceback.StackSummary) -> bool:
    """Return whether the script or a library raised it, or PyTorch refused what they passed to it."""
    if isinstance(error, OSError | MemoryError | NotImplementedError) or not frames:
        return False
    if not isinstance(error, Exception | KeyboardInterrupt):
        return False
    last = frames[-1]
    if _IN_WORKER in str(error):
        files = re.findall(r'^ *File "([^"]+)", line', str(error), re.MULTILINE)
        return bool(files) and _is_outside(files[-1])
    if isinstance(error, AttributeError | TypeError) and re.search("torch|cuda", f"{last.line} {error}"):
        return False  # something of PyTorch that the virtual GPU may lack
    return _is_outside(last.filename) or _is_refused(error, last)


def _is_refused(error: BaseException, last: traceback.FrameSummary) -> bool:
    """Return whether PyTorch, or Ullage in its place, refused arguments: sizes that do not match, an empty data set."""
    if _REFUSED_SIZES.search(str(error)):
        return True
    # Not in C++, which may lack the data of a tensor, nor by an assertion of Ullage, which is a bug of its own.
    raised = (last.line or "").startswith("raise " if last.filename.startswith(_PACKAGE) else ("raise ", "assert "))
    environment = _ENVIRONMENT.intersection(Path(last.filename).parts)
    return type(error) in (RuntimeError, ValueError, IndexError, AssertionError) and raised and not environment


def _is_outside(filename: str) -> bool:
    return not filename.startswith(_PACKAGE) and "torch" not in filename.split("/")


def _kind(error: BaseException) -> str:
    names = {kind.__name__ for kind in type(error).__mro__}
    if "OutOfMemoryError" in names:
        return "out of memory"
    if "UllageError" in names:
        return "unsupported"
    if isinstance(error, ModuleNotFoundError) and error.name:  # libraries raise it without a name, with their own text
        return "package"
    return "exception"


def _is_library(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith((sys.base_prefix, "<frozen"))


def missing_package(failure: dict[str, Any]) -> str:
    """Return the package that an import did not find, if any."""
    return (failure.get("missing") or "").split(".")[0]


def is_launcher_missing(failure: dict[str, Any]) -> bool:
    """Return whether a script failed because it expects to be started by torchrun."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
    if failure.get("key") in names:
        return True
    message = str(failure.get("message", ""))
    return any(f"environment variable {name} expected" in message for name in names)


def is_own(failure: dict[str, Any]) -> bool:
    """Return whether a script would also fail on a real GPU: by its own code, not misled by an assumed value."""
    if failure.get("refused") or failure.get("made_up") or is_launcher_missing(failure):
        return False
    kind = failure["kind"]
    if kind == "exception":
        if _lacks_checkpoint(failure) or _lacks_network(failure) or _lacks_room(failure):
            return False
        if _lacks_data(failure):
            return bool(failure["absent"]) and not failure["program"]
        return bool(failure["of_script"]) and not failure["of_gpu"]
    return kind in ("syntax", "package") or (kind == "exit" and failure["code"] == 2)


def message(failure: dict[str, Any], shown: str, seconds: float, network: bool = False) -> str:
    """Return the message for a failure; `shown` is the script as typed, `seconds` its time limit.

    `network` says whether the script was allowed to reach other machines.
    """
    kind = failure["kind"]
    failure = {**failure, "network": network}
    if failure.get("refused") and kind in ("exception", "exit", "no gpu"):
        return f"{shown}: {failure['refused']}"
    return _MESSAGES[kind](failure, shown, seconds)


def only_pytorch(shown: str, framework: str) -> str:
    """Return the message for a script that trains with another framework."""
    return f"{shown} uses {framework}, and nothing in it imports PyTorch: only PyTorch is followed"


def _typed(failure: dict[str, Any], shown: str, option: str = "", variable: str = "") -> str:
    """Return the command with one more option or variable, or how to change it if a launcher was typed."""
    if failure.get("launched"):
        place = f"{option} after" if option else f"{variable} before"
        return f"the same line as before, with {place} 'ullage estimate'"
    return f"{variable} ullage estimate {shown.replace('-m ', '--module ')} {option}".strip()


def _at(failure: dict[str, Any]) -> str:
    if not failure.get("file"):
        return ""
    text = f": {failure['text'].strip()}" if failure.get("text") else ""
    return f" (line {failure['line']} of {failure['file']}{text})"


def _lacks_data(failure: dict[str, Any]) -> bool:
    lowered = failure["message"].casefold()
    return any(name in _DATA_ERRORS for name in failure["chain"]) or _DATA_WORDS.search(lowered) is not None


def _lacks_network(failure: dict[str, Any]) -> bool:
    lowered = failure["message"].casefold()
    return any(name in _NETWORK_ERRORS or "connect" in name.casefold() for name in failure["chain"]) or (
        failure["type"] in ("OSError", "HTTPError", "RuntimeError", "ValueError", "LocalEntryNotFoundError")
        and failure["of_library"]  # a script's own error may speak of another kind of network
        and _NETWORK_WORDS.search(lowered) is not None
    )


def _lacks_room(failure: dict[str, Any]) -> bool:
    return "No space left on device" in failure["message"]


def _lacks_checkpoint(failure: dict[str, Any]) -> bool:
    """Return whether it is about a file of the hub that is not in the local cache."""
    repository = (failure.get("not_cached") or [""])[0]
    return bool(repository) and ("LocalEntryNotFoundError" in failure["chain"] or repository in failure["message"])


def _not_cached(failure: dict[str, Any], shown: str) -> str:
    repository, file = failure["not_cached"]
    text = f"{shown} needs {file} of {repository}, which is not in the local cache of the hub{_at(failure)}"
    if failure["network"]:
        return f"{text}, and the hub did not give it: {failure['message'].splitlines()[0]}"
    return (
        f"{text}. Type: {_typed(failure, shown, '--network')}, which downloads no weights; or: "
        f"hf download {repository} --include '*.json' '*.txt' '*.model'"
    )


def _exception(failure: dict[str, Any], shown: str, seconds: float) -> str:
    what = f"{' '.join(failure['message'].split())[:_LONGEST]}{_at(failure)}"
    if _lacks_checkpoint(failure):
        return _not_cached(failure, shown)
    if _lacks_network(failure) and not failure["network"]:
        return (
            f"{shown} asked the network for something, which an estimate may only do with --network (in Python: "
            f"network=True): {what}. Type: {_typed(failure, shown, '--network')}; "
            "or download it first"
        )
    if _lacks_network(failure):
        return (
            f"{shown} asked the network for something and did not get it: {what}. "
            "Download it first, or run where there is a network. Only the shapes of the data matter, not its contents"
        )
    if _lacks_room(failure):
        return f"{shown} wrote more than an estimate may: {what}. Give it less to write, such as fewer checkpoints"
    if failure["type"] == "MemoryError":
        return f"{shown} asked for more memory than this machine has: {what}. Give it less data to hold"
    if failure["missing"] and _LACKS_CUDA.search(failure["message"]):
        return (
            f"{shown} needs {failure['missing']}, an extension compiled for GPUs that cannot be loaded here: {what}. "
            "Import and call it inside a torch.library.custom_op, and register with register_fake what that returns"
        )
    if requested := _ASKS_FOR_GPUS.search(failure["message"]):
        command = _typed(failure, shown, f"--world-size {int(requested[1]) + 1}")
        return f"{shown} asks for {int(requested[1]) + 1} GPUs, and ran on fewer: {what}. Type: {command}"
    if _ASKS_DRIVER.search(f"{failure['program']} {failure['message']}"):
        return (
            f"{shown} asked the NVIDIA driver, which a virtual GPU has not: {what}. Let it ask PyTorch, or leave it out"
        )
    if failure["program"]:
        return f"{shown} needs the program {failure['program']}, which is not there: {what}"
    if _lacks_data(failure):
        return (
            f"{shown} needs data that is not there: {what}. Pass the path of the data, or of a few files of the same "
            "shape, as an argument of the script, after `--`. Only the shapes of the data matter, not its contents"
        )
    if "invalid device ordinal" in failure["message"].casefold():
        return (
            f"{shown} asked for a second GPU; there is one virtual GPU, cuda:0{_at(failure)}. "
            "A script of many processes with a GPU each is followed as one of them: say how many with --world-size"
        )
    if "attempted relative import" in failure["message"]:
        module = ".".join(Path(shown).with_suffix("").parts)
        return f"{shown} is part of a package: {what}. Type, from above it: ullage estimate --module {module}"
    if operator := _NO_OPERATOR.search(failure["message"]):
        return (
            f"{shown} needs the operator {operator[1]}::{operator[2]}, which is not there{_at(failure)}: the package "
            "that brings it is not installed here, or was built without it"
        )
    if is_own(failure):
        return f"{shown} fails: {what}{_another_release(failure, shown)}"
    if failure["of_script"]:
        return f"{shown} fails: {what}. It ran with one virtual GPU, cuda:0, whose tensors have no data"
    if _OTHER_VERSION.search(failure["message"]):
        return (
            f"{shown} fails: {what}. Was it written for another version of PyTorch or of a package? Name a Python that "
            f"has it: {_typed(failure, shown, '--python PATH')}. If the script works on a real "
            f"GPU with the versions of {failure['python']}, please report this as a bug"
        )
    return f"{shown} failed on the virtual GPU: {what}. If the script works on a real GPU, please report this as a bug"


def _another_release(failure: dict[str, Any], shown: str) -> str:
    """Return advice for a script that imports a name that this release of a package lacks."""
    release = (failure.get("without") or {}).get("release")
    if release is None:
        return ""
    python = _typed(failure, shown, "--python PATH")
    return f". The script needs another release than {release}; name a Python that has one: {python}"


def _exit(failure: dict[str, Any], shown: str, seconds: float) -> str:
    hint = " (argparse uses it for wrong arguments)" if failure["code"] == 2 else ""
    return f"{shown} exited with exit code {failure['code']}{hint}, before anything could be estimated"


def _syntax(failure: dict[str, Any], shown: str, seconds: float) -> str:
    return f"{failure['file']} is not Python: {failure['message']}{_at(failure)}"


def _package(failure: dict[str, Any], shown: str, seconds: float) -> str:
    package = missing_package(failure)
    if package in _COMPILED_FOR_GPUS:
        return (
            f"{shown} needs the package {package}{_at(failure)}, compiled code for GPUs that the virtual GPU cannot "
            "follow. Estimate it with PyTorch's own operators instead, such as scaled_dot_product_attention, or import "
            "and call it inside a torch.library.custom_op with a fake"
        )
    if without := failure.get("without"):
        module = f"{shown} needs the module {failure['missing']}{_at(failure)}"
        if "folder" in without:
            return f"{module}, which is not in {without['folder']}"
        return (
            f"{module}, which {without['release']} of {failure['python']} does not have: it was written for another "
            f"release. Name a Python that has it: {_typed(failure, shown, '--python PATH')}"
        )
    needs = f"{shown} needs the package {package}, which is not installed for {failure['python']}{_at(failure)}"
    if failure.get("around"):
        folder = shlex.quote(failure["around"])
        return f"{needs}. It is in {folder}; type: {_typed(failure, shown, variable=f'PYTHONPATH={folder}')}"
    if failure.get("elsewhere"):
        there = failure["elsewhere"]
        return f"{needs}. {there} has it; type: {_typed(failure, shown, f'--python {there}')}"
    name = dict(pair.split("=") for pair in _OTHER_NAMES.split()).get(package, package)
    install = f"{failure['python']} -m pip install {name}"
    return f"{needs}; type: {install}, or name a Python that has it: {_typed(failure, shown, '--python PATH')}"


def _no_gpu(failure: dict[str, Any], shown: str, seconds: float) -> str:
    text = (
        f"{shown} never used the GPU in {failure['steps']} optimizer steps"
        if failure["steps"]
        else (f"{shown} ran to its end and never used the GPU")
    )
    commands = failure.get("commands") or []
    if commands:
        return f"{text}; it started another program ({commands[0][:200]}): estimate that one instead"
    return (
        f'{text}: no tensor was made on "cuda". Is there an option that chooses the device, such as --device cuda? '
        "Pass it after `--`. "
        + ("" if failure["steps"] else "If it needs several GPUs, say how many with --world-size. ")
        + "Only PyTorch is followed: other frameworks do not use the virtual GPU"
    )


def _timeout(failure: dict[str, Any], shown: str, seconds: float) -> str:
    passes = failure.get("passes", 0)
    reached = f"{passes} backward passes and no optimizer step" if passes else "no backward pass"
    return (
        f"{shown} had come to {reached} after {format_duration(seconds)}{_at(failure)}. Give it more time with "
        "--timeout, or less to do before it trains: pass arguments of the script after `--`"
    )


_MESSAGES = {
    "exception": _exception,
    "exit": _exit,
    "syntax": _syntax,
    "package": _package,
    "no gpu": _no_gpu,
    "timeout": _timeout,
    "refused": lambda failure, shown, seconds: f"{shown}: {failure['how']}",
    "died": lambda failure, shown, seconds: (
        f"the process of {shown} {failure['how']}"
        + (
            ": compiled code may have read a tensor of the virtual GPU, which has no data"
            if "SIGSEGV" in failure["how"]
            else ""
        )
    ),
    "unsupported": lambda failure, shown, seconds: f"{shown}: {failure['message'].split(': ', 1)[-1]}{_at(failure)}",
    "out of memory": lambda failure, shown, seconds: f"{shown} ran out of memory: {failure.get('out_of_memory')}",
}
