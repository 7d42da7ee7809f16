"""Models of the Hugging Face hub by id: `hf:ORG/NAME` needs only the configuration, never the weights.

It comes from the local cache of `from_pretrained` and `hf download`, or else from the hub. Nothing here
imports PyTorch.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from ullage.errors import InvalidValue, MissingPackage

CONFIG = "config.json"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[a-z0-9][a-z0-9_.-]*")  # the oldest models have no organisation
_SECONDS = 10.0  # limit for an answer of the hub


def is_hub_id(name: str) -> bool:
    """Whether a name is that of a model on the hub, perhaps with `@REVISION`; a folder with this name takes precedence.

    >>> is_hub_id("Qwen/Qwen3-8B"), is_hub_id("gpt2"), is_hub_id("GPT2LMHeadModel"), is_hub_id("./folder")
    (True, True, False, False)
    """
    return _ID.fullmatch(name.partition("@")[0]) is not None and not Path(name).is_dir() and not name.endswith(".json")


def is_checkpoint(name: str) -> bool:
    """Return whether a name after `hf:` means trained weights, on the hub or in a folder, rather than a class."""
    return is_hub_id(name) or "/" in name or "\\" in name or name in (".", "..")


def read_config(place: str) -> dict[str, Any]:
    """Return the values of a config: of a JSON file, of the config.json in a folder, or of a model on the hub."""
    path = Path(place)
    if path.is_dir():
        path = path / CONFIG
    elif not path.is_file() and is_hub_id(place):
        path = _config_of(place)
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise InvalidValue(f"{path} must be a JSON object, got {type(values).__name__}")
    return values


def weights_type(values: dict[str, Any]) -> str:
    """Return the type of weights that `from_pretrained` loads by default, which is that of the checkpoint.

    >>> weights_type({"torch_dtype": "bfloat16"}), weights_type({"text_config": {"dtype": "float16"}}), weights_type({})
    ('bfloat16', 'float16', 'float32')
    """
    inner = [part for part in values.values() if isinstance(part, dict)]
    for part in (values, *inner):
        dtype = part.get("dtype") or part.get("torch_dtype")
        if isinstance(dtype, str):
            return dtype.removeprefix("torch.")
    return "float32"


def quantization_of(values: dict[str, Any], model: str) -> str | None:
    """Return the quantization of saved weights: "nf4", "fp4" or "int8"; `None` if there is none.

    >>> quantization_of({"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}, "hf:x/y")
    'nf4'
    """
    saved = values.get("quantization_config")
    if not isinstance(saved, dict):
        return None
    if saved.get("load_in_4bit"):
        return str(saved.get("bnb_4bit_quant_type", "fp4"))
    if saved.get("load_in_8bit"):
        return "int8"
    method = saved.get("quant_method", "a method that it does not name")
    raise InvalidValue(
        f"the weights of a model by name must be quantized by bitsandbytes or not at all, but those of {model} are "
        f"quantized by {method}. Estimate a script that loads it, or its base model with --quantize nf4"
    )


def cached_ids() -> list[str]:
    """Return the models with a config in the local cache, for shell completion."""
    files = cache_folder().glob(f"models--*/snapshots/*/{CONFIG}")
    return sorted({file.parents[2].name.removeprefix("models--").replace("--", "/") for file in files})


def cache_folder() -> Path:
    """Return the cache folder of the hub's library, from the variables that it reads, without importing it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(above) / "huggingface").expanduser() / "hub"


def _config_of(name: str) -> Path:
    """Return the config.json of a model, from the local cache or else downloaded."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError:
        raise MissingPackage("transformers", "models named hf:ORG/NAME") from None
    model, _, revision = name.partition("@")
    which: dict[str, Any] = {"repo_id": model, "filename": CONFIG, "revision": revision or None}
    try:
        return Path(hub.hf_hub_download(**which, local_files_only=True))
    except errors.HFValidationError as error:
        raise InvalidValue(f"hf:NAME must be a name of the hub, got {name}: {error}") from None
    except errors.LocalEntryNotFoundError:
        pass
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(**which), timeout=_SECONDS)  # a download would try for a minute
        return Path(hub.hf_hub_download(**which))
    except errors.GatedRepoError:
        page = f"{hub.constants.ENDPOINT}/{model}"
        raise InvalidValue(
            f"{model} is gated: accept its terms at {page}, then type: hf auth login. A config that you have is taken "
            "by hf:CLASS --set config=FILE"
        ) from None
    except errors.RepositoryNotFoundError:
        raise InvalidValue(
            f"the hub ({hub.constants.ENDPOINT}) has no model {model} that you may see; check its name, or, if it is "
            "private, type: hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise InvalidValue(f"{model} has no revision {revision} on the hub") from None
    except errors.EntryNotFoundError:
        raise InvalidValue(f"{model} has no {CONFIG} on the hub: it is not a model of transformers") from None
    except Exception as error:  # from the hub's library, the one below it, or the system
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        command = f"hf download {model} {CONFIG}" + (f" --revision {revision}" if revision else "")
        raise InvalidValue(
            f"the config of {model} is not in the local cache ({cache_folder()}), and reading it from the hub failed "
            f"({reason.strip()}). With a network, type: {command}"
        ) from None
