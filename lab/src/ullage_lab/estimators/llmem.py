"""`llmem`: fine-tuning of decoder language models on one GPU or several, after Kim et al. 2024.

Mixed precision with Adam under ZeRO-3 in chunks and with activation checkpointing, as the authors fine-tune: 16-bit
weights whose place their gradients take over, 32-bit copies, momentum and variance; the output of every decoder layer;
the language model's head with its loss. With n GPUs in data parallel (dp) or tensor parallel (tp):

    one GPU     weights 2·P,      optimizer 12·P
    dp = n      weights 2·P gathered (1/n held and (n-1)/n fetched), optimizer 12·P / n
    tp = n      weights 2·P / n,  optimizer 12·P / n, gathered outputs (n-1)/n a layer in the backward pass
    dp · tp     both: a shard of 1/tp of everything, of which the optimizer is spread over dp

Each tensor is rounded up to the 2 MiB pages of the driver. The terms come from the authors' size_estimator.py, since
the paper's text was not available. Differences: all weights count (there only linear and embedding ones), and dp
combined with tp is computed as above. The authors measure the context and the chunks on the GPU; here the context is
the catalogue's, and chunks are assumed to be full.
"""

import time
from dataclasses import dataclass
from typing import Any

from torch import nn

from ullage.errors import InvalidValue
from ullage.estimation.estimators.answer import answer, read_options
from ullage.estimation.estimators.registry import estimator
from ullage.estimation.result import Estimate
from ullage.hardware import GPU
from ullage.jobs.job import JobRequest
from ullage.jobs.sources.build import prepare
from ullage.virtual import VirtualGPU

PAGE = 2 << 20
_DECODERS = ("ForCausalLM", "LMHeadModel")
_ADAM = ("adam", "adamw", "adam_fused", "adamw_fused")


@dataclass(frozen=True, slots=True)
class Decoder:
    """The inputs of the formulas: the size of every weight, and the model's shape."""

    weights: tuple[int, ...]
    layers: int
    hidden: int
    vocabulary: int


def pages(size: float) -> int:
    return -(-int(size) // PAGE) * PAGE


def parts_of(
    decoder: Decoder, batch: int, length: int, *, dp: int = 1, tp: int = 1, head_in_32_bits: bool = False
) -> dict[str, int]:
    """Return the bytes on one of dp · tp GPUs without the context; `batch` is that of one GPU."""
    if dp < 1 or tp < 1:
        raise InvalidValue(f"dp and tp must be at least 1, got {dp} and {tp}")
    return {
        "parameters": sum(_weight(size, dp, tp) for size in decoder.weights),
        "optimizer": sum(3 * pages(4 * size / (dp * tp)) for size in decoder.weights),
        "activations": _activations(decoder, batch, length, tp, head_in_32_bits),
    }


def _weight(size: int, dp: int, tp: int) -> int:
    """Return the bytes of a 16-bit weight: this GPU's shard, and the part fetched from others; gradients reuse them."""
    shard = 2 * size / tp
    return pages(shard / dp) + (pages(shard * (dp - 1) / dp) if dp > 1 else 0)


def _activations(decoder: Decoder, batch: int, length: int, tp: int, head_in_32_bits: bool) -> int:
    ids = pages(8 * batch * length)
    output = 2 * batch * length * decoder.hidden
    residuals = (decoder.layers + 2) * pages(output)  # two embeddings and every layer
    gathered = decoder.layers * pages(output * (tp - 1) / tp) if tp > 1 else 0
    width = 4 if head_in_32_bits else 2
    logits = pages(width * batch * length * decoder.vocabulary)
    shifted = pages(width * batch * (length - 1) * decoder.vocabulary)  # without the last token, and its gradient
    return ids + residuals + gathered + logits + 2 * shifted


def decoder_of(model: nn.Module) -> Decoder:
    """Return the inputs of the formulas from a transformers model; tied weights count once."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    numbers = [getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size")]
    if config is None or None in numbers:
        raise InvalidValue(f"{type(model).__name__} does not tell its layers, width and vocabulary")
    layers, hidden, vocabulary = (int(number) for number in numbers if number is not None)
    weights = {id(weight): weight.numel() for weight in model.parameters()}
    return Decoder(tuple(weights.values()), layers, hidden, vocabulary)


def _supports(request: JobRequest) -> str | None:
    if request.kind != "model" or request.model is None:
        return f"it needs a decoder language model by its name; this is a {request.kind}"
    c = request.model
    if c.source != "hf":
        return f"it knows decoder language models of transformers; {c.name} is none"
    if c.config is None and not c.short_name.endswith(_DECODERS):
        return f"it knows decoders with a language model's head, not {c.short_name}"
    if c.optimizer not in _ADAM:
        return f"it is made for Adam; this is {c.optimizer}"
    if c.inference or c.lora is not None or c.freeze:
        return "it is made for the fine-tuning of all weights"
    if c.precision in ("fp32", "tf32"):
        return f"it is made for 16-bit training; this is {c.precision}"
    if not c.checkpointing:
        return "its authors fine-tune with activation checkpointing; this run has none (--checkpointing)"
    return None


@estimator(
    "llmem",
    title="decoder fine-tuning with data and tensor parallelism",
    source="Kim et al., LLMem, IJCAI 2024, by its repository taehokim20/LLMem, size_estimator.py",
    needs="the decoder's config, batch and sequence length",
    supports=_supports,
)
def run(request: JobRequest, gpu: GPU) -> Estimate:
    """Estimate one of the GPUs; options: dp, tp, head_in_32_bits."""
    begin = time.perf_counter()
    assert request.model is not None
    options = read_options("llmem", request.options, {"dp": 1, "tp": 1, "head_in_32_bits": False})
    with VirtualGPU(gpu, limited=False):
        model, task = prepare(request.model)
        decoder = decoder_of(model)
        inputs, _ = task.batch(request.model.batch_size)
        del model, task  # weights that are alive on leaving would be filled with their initial values
    ids = inputs["input_ids"] if isinstance(inputs, dict) else inputs
    parts = parts_of(decoder, int(ids.shape[0]), int(ids.shape[1]), **options)
    notes = [
        f"16-bit weights, 32-bit Adam in ZeRO-3 chunks, checkpointed layers; dp={options['dp']}, tp={options['tp']}; "
        "the head's outputs are in " + ("32" if options["head_in_32_bits"] else "16") + " bits",
        "the authors measure the context and the chunks on the GPU; here the context is the catalogue's, chunks full",
    ]
    if gpu.context is None:
        notes.append(f"the context of {gpu.name} is not known: the figure is reserved memory")
    else:
        parts["context"] = gpu.context
    kind = "reserved" if gpu.context is None else "process"
    return answer("llmem", gpu, kind, parts, seconds=time.perf_counter() - begin, notes=notes)
