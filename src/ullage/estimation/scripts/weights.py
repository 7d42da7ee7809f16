"""Trained weights that a script loads by name: only their shapes matter, so they are not downloaded.

A checkpoint of the Hugging Face hub that is not in the local cache becomes a file with the true header and a hole
instead of values. The library opens it like any other file, so its own code decides what moves to the GPU and when. The
header comes from the hub, if the network may be used, or from the model's config. The file lies in the script's sandbox
and vanishes with it. The same holds for a local folder that has a config and no weights.

Weights that PyTorch downloads from an address (`torch.hub`, torchvision) have no header to request. They fit any model
that loads them.
"""

import functools
import importlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from ullage.virtual.call.replacements import Replacements
from ullage.virtual.torch_cuda.safetensors import TYPE_NAMES

_SAFETENSORS = ".safetensors"
_PICKLED = (".bin", ".pth", ".pt", ".ckpt")
_FILES = ("model.safetensors", "diffusion_pytorch_model.safetensors")  # a checkpoint in one piece
_CONFIG = "config.json"
_FIRST_BYTES = 1 << 17  # of a file: most headers are shorter
_NO_COMMIT = "0" * 40  # for a repository that is not in the cache
_FITTING = "ullage: weights that fit"
_OF_CONFIG = "shapes and types are those of its configuration"
_MODELS = {  # by module: the class of all models, and what a checkpoint of theirs is called
    "transformers.modeling_utils": ("PreTrainedModel", _FILES[0]),
    "diffusers.models.modeling_utils": ("ModelMixin", _FILES[1]),
}
_OTHER_WEIGHTS = {"state_dict", "gguf_file", "from_tf", "from_flax"}  # options that name another source
Tensors = dict[str, torch.Tensor]


class Weights:
    """Replaces the weights that a script loads by name.

    `missing` is the repository and the file of the last request that could not be answered.
    """

    def __init__(self, note: Callable[[str, str], Any]) -> None:
        self._note = note
        self.missing: tuple[str, str] | None = None

    def install(self, replacements: Replacements) -> None:
        """Replace downloads of weights, also in libraries that are imported later."""
        replacements.when_imported("huggingface_hub.file_download", lambda hub: self._watch_hub(hub, replacements))
        for module in _MODELS:
            replacements.when_imported(module, lambda home: self._watch_folders(home, replacements))
        download, load = torch.hub.download_url_to_file, nn.Module.load_state_dict

        @functools.wraps(download)
        def download_url_to_file(url: str, dst: str, *args: Any, **options: Any) -> None:
            if not url.partition("?")[0].endswith(_PICKLED):
                return download(url, dst, *args, **options)
            self._say(url.rpartition("/")[2], "shapes are those of the model")
            torch.save({_FITTING: torch.zeros(())}, dst)

        @functools.wraps(load)
        def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **options: Any) -> Any:
            if _FITTING in state_dict:
                return _IncompatibleKeys([], [])
            return load(self, state_dict, *args, **options)

        replacements.put(torch.hub, "download_url_to_file", download_url_to_file)
        replacements.put(nn.Module, "load_state_dict", load_state_dict)

    def _say(self, what: str, how: str) -> None:
        self._note("weights", f"the weights of {what} were not downloaded: their {how}")

    def _watch_hub(self, hub: Any, replacements: Replacements) -> None:
        ask: Any = hub.hf_hub_download
        fetch: Any = getattr(hub, "_download_to_tmp_and_move", None)

        @functools.wraps(ask)
        def hf_hub_download(repo_id: str, filename: str, **options: Any) -> Any:
            try:
                return ask(repo_id, filename, **options)
            except hub.LocalEntryNotFoundError:
                made = self._made_here(hub, repo_id, filename, options)
                if made is None:
                    raise
                return str(made)

        def download(*, destination_path: Path, url_to_download: str, filename: str, **options: Any) -> None:
            place = Path(destination_path)
            if filename.endswith(_SAFETENSORS):
                _dig(place, *_header_of(url_to_download, options.get("headers") or {}))
                self._say(filename, "shapes and types are those of its header")
            elif not (filename.endswith(_PICKLED) and self._made_pickled(place, filename)):
                fetch(destination_path=destination_path, url_to_download=url_to_download, filename=filename, **options)

        replacements.put(hub, "hf_hub_download", hf_hub_download)
        if fetch is not None:
            replacements.put(hub, "_download_to_tmp_and_move", download)

    def _made_here(self, hub: Any, repo_id: str, filename: str, options: dict[str, Any]) -> Path | None:
        """Make a checkpoint without the network; `None` if the file is not a checkpoint, or too little is known."""
        if options.get("repo_type") not in (None, "model"):
            return None
        inner = options.get("subfolder") or os.path.dirname(filename)
        file = os.path.basename(filename)
        self.missing = (repo_id, os.path.join(inner, file))
        if file not in _FILES:
            return None
        where = {name: options[name] for name in ("cache_dir", "revision") if options.get(name)}
        config = hub.try_to_load_from_cache(repo_id, os.path.join(inner, _CONFIG), **where)
        if isinstance(config, str):
            folder, made = Path(config).parent, _of_config(Path(config))
        else:
            made = _of_timm(repo_id)
            folder = _new_snapshot(hub, repo_id, **where) if made is not None else Path()
        if made is None or _has_weights(folder):
            return None
        _dig(folder / file, *_header(made))
        self._say(repo_id, _OF_CONFIG)
        return folder / file

    def _watch_folders(self, home: Any, replacements: Replacements) -> None:
        name, file = _MODELS[home.__name__]
        kind = getattr(home, name)
        load: Any = kind.from_pretrained.__func__

        @functools.wraps(load)
        def from_pretrained(cls: Any, path: Any = None, *args: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and not any(map(options.get, _OTHER_WEIGHTS)):
                self._fill(Path(path, options.get("subfolder") or ""), file, cls.__name__)
            return load(cls, path, *args, **options)

        replacements.put(kind, "from_pretrained", classmethod(from_pretrained))

    def _fill(self, folder: Path, file: str, kind: str) -> None:
        """Put a checkpoint into a folder that has a config and no weights. The class is that of the caller unless the
        config names one."""
        config = folder / _CONFIG
        made = None if not config.is_file() or _has_weights(folder) else _of_config(config, kind)
        if made is not None:
            _dig(folder / file, *_header(made))
            self._note("weights", f"the weights of {folder} are not there: their {_OF_CONFIG}")

    def _made_pickled(self, place: Path, filename: str) -> bool:
        """Make a pickled checkpoint, which has no header, from the config next to it, if there is one."""
        inner = os.path.join(os.path.dirname(filename), _CONFIG)
        configs = [*place.parent.parent.glob(f"snapshots/*/{inner}"), place.parent / _CONFIG]  # of a blob, of a folder
        made = next((tensors for config in configs if config.is_file() and (tensors := _of_config(config))), None)
        if made is None:
            return False
        torch.save({name: torch.zeros((), dtype=part.dtype).expand(part.shape) for name, part in made.items()}, place)
        self._say(filename, _OF_CONFIG)
        return True


def _has_weights(folder: Path) -> bool:
    return any(file.name.endswith((_SAFETENSORS, *_PICKLED)) for file in folder.glob("*"))


def _new_snapshot(hub: Any, repo_id: str, cache_dir: str | None = None, revision: str = "main") -> Path:
    """Make the folder in which the hub's library looks for a repository that it has not seen."""
    repository = Path(cache_dir or hub.constants.HF_HUB_CACHE, hub.repo_folder_name(repo_id=repo_id, repo_type="model"))
    reference, snapshot = repository / "refs" / revision, repository / "snapshots" / _NO_COMMIT
    for folder in (reference.parent, snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    reference.write_text(_NO_COMMIT)
    return snapshot


# The content of a checkpoint by the configuration of its model: tensors without data.


def _of_config(config: Path, kind: str | None = None) -> Tensors | None:
    """Return the tensors of a model of transformers, diffusers or timm; `None` if the config does not name it. A class
    of transformers that it does not name is `kind`."""
    values = json.loads(config.read_text())
    if values.get("quantization_config"):
        return None  # only their library knows the saved form of quantized weights
    try:
        saved = values.get("architectures") or ([kind] if kind and values.get("model_type") else None)
        if saved:
            return _of_transformers(config.parent, saved[0])
        if values.get("_class_name"):
            diffusers = importlib.import_module("diffusers")
            with torch.device("meta"):
                return dict(getattr(diffusers, values["_class_name"]).from_config(values).state_dict())
    except (ImportError, AttributeError, ValueError, KeyError, OSError):
        return None
    return _of_timm(f"timm/{values.get('architecture')}") if values.get("architecture") else None


def _of_transformers(folder: Path, name: str) -> Tensors:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(config)
    first: dict[int, str] = {}  # of tied weights, which are saved once
    for key, part in model.state_dict(keep_vars=True).items():
        first.setdefault(id(part), key)
    state = {key: part for key, part in model.state_dict().items() if key in first.values()}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return state
    return dict(revert_weight_conversion(model, state))


def _of_timm(repo_id: str) -> Tensors | None:
    """Return the tensors of a model of timm, whose repositories have the names of its models."""
    owner, _, name = repo_id.partition("/")
    if owner != "timm":
        return None
    try:
        import timm

        with torch.device("meta"):
            return dict(timm.create_model(name, pretrained=False).state_dict())
    except (ImportError, RuntimeError, ValueError):
        return None


# A file of safetensors: the length of its header, the header (JSON), and the values.


def _dig(place: Path, header: bytes, size: int) -> None:
    place.unlink(missing_ok=True)
    with place.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(size)


def _header(tensors: Tensors) -> tuple[bytes, int]:
    entries, end = {}, 0
    for name, part in tensors.items():
        begin, end = end, end + part.numel() * part.element_size()
        entries[name] = {"dtype": TYPE_NAMES[part.dtype], "shape": list(part.shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return text, 8 + len(text) + end


def _header_of(url: str, headers: dict[str, str]) -> tuple[bytes, int]:
    """Return the header of a file on the hub, and the length of the file."""
    begin, size = _part(url, headers, 0, _FIRST_BYTES)
    (length,) = struct.unpack("<Q", begin[:8])
    if 8 + length > len(begin):
        begin += _part(url, headers, len(begin), 8 + length)[0]
    return begin[8 : 8 + length], size


def _part(url: str, headers: dict[str, str], begin: int, end: int) -> tuple[bytes, int]:
    session: Any = importlib.import_module("huggingface_hub.utils").get_session()
    answer = session.get(url, headers={**headers, "Range": f"bytes={begin}-{end - 1}"})
    answer.raise_for_status()
    return answer.content, int(answer.headers["Content-Range"].rpartition("/")[2])
