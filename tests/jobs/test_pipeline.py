"""A model by name as stages of a pipeline."""

import copy

import pytest
import torch

import ullage
from ullage.errors import InvalidValue, ModelLacks
from ullage.estimation.timeline.trace import Trace
from ullage.jobs.model import Model
from ullage.jobs.pipeline import Stage, cut, layers_of_stages, microbatches
from ullage.jobs.sources.build import prepare
from ullage.virtual.memory.deferred_cpu import Host

STAGES = 3
SIZES = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 200}
GPT2, LLAMA = "hf:GPT2LMHeadModel", "hf:LlamaForCausalLM"
MODELS = {
    "hf:LlamaForCausalLM": {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2},
    "hf:GPT2LMHeadModel": {"n_embd": 64, "n_layer": 5, "n_head": 4, "vocab_size": 200},  # places are added
    "hf:BertForMaskedLM": {**SIZES, "intermediate_size": 96},  # its embeddings are a part with several weights
    "hf:OPTForCausalLM": {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 32},  # embeddings that are projected
}


def prepared(name, **more):
    torch.manual_seed(0)
    configuration = Model(name, batch_size=2, **more)
    model, task = prepare(configuration)
    return configuration, model.eval(), task


@pytest.mark.parametrize("name", MODELS)
def test_stages_in_a_row_compute_what_the_model_does(name):
    configuration, model, task = prepared(name, settings=MODELS[name], sequence_length=16)
    inputs, targets = task.batch(2)
    whole = task.forward(model, inputs, targets)
    passed, weights = inputs["input_ids"], set()
    for number in range(STAGES):
        stage = cut(copy.deepcopy(model), task, number, STAGES, configuration)
        weights |= {name for name, _ in stage.model.named_parameters() if "layer" not in name and ".h." not in name}
        passed = stage(passed, **(targets if stage.is_last else {}))
    assert passed.item() == pytest.approx(whole.item(), abs=1e-5)
    assert not passed._is_view(), "PyTorch 2.6 detaches what the last stage gives in place"
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert weights <= every, "no stage has weights of its own"


def test_a_stage_has_its_own_layers_and_what_is_at_its_end():
    configuration, model, task = prepared(LLAMA, settings=MODELS[LLAMA], sequence_length=16)
    stages = [cut(copy.deepcopy(model), task, each, STAGES, configuration) for each in range(STAGES)]
    names = [{name.removeprefix("model.") for name, _ in each.model.named_parameters()} for each in stages]
    assert "embed_tokens.weight" in names[0] and not any("embed" in name for name in names[1] | names[2])
    assert {"norm.weight", "lm_head.weight"} <= names[2] and not {"norm.weight", "lm_head.weight"} & names[0]
    assert [len(each.model.model.layers) for each in stages] == [1, 2, 2]


def test_layers_and_samples_are_shared_as_evenly_as_can_be():
    assert [len(part) for part in layers_of_stages(32, 5)] == [6, 7, 7, 6, 6]
    assert microbatches(32, 4) == 16 and microbatches(4, 4) == 4
    with pytest.raises(InvalidValue, match="4 stages needs at least 4 samples in a step, got 3"):
        microbatches(3, 4)


def test_layers_that_cannot_be_cut_are_reported():
    refused = {"torchvision:alexnet": {}, "hf:ViTForImageClassification": {"settings": {"num_hidden_layers": 2}}}
    for name, more in refused.items():
        configuration, model, task = prepared(name, **more)
        with pytest.raises(ModelLacks, match="stages need a model of transformers that takes text"):
            cut(model, task, 0, 2, configuration)
    configuration, model, task = prepared(GPT2, settings=MODELS[GPT2], sequence_length=16)
    with pytest.raises(InvalidValue, match="8 stages needs at least 8 layers, got 5"):
        cut(model, task, 0, 8, configuration)


def test_a_refusal_gives_no_weights_their_values(monkeypatch):
    """Eight billion random numbers would take minutes."""
    filled = []
    monkeypatch.setattr(Host, "_run", lambda self, unfilled, tensor: filled.append(tensor.nbytes))
    sizes = {"settings": MODELS["hf:LlamaForCausalLM"], "sequence_length": 16, "batch_size": 1}
    with pytest.raises(InvalidValue, match="needs at least 4 samples"):
        ullage.estimate(ullage.Model("hf:LlamaForCausalLM", **sizes), gpu="H100", ranks=ullage.Ranks(4, parallel="pp"))
    assert not filled


@pytest.mark.slow
def test_stages_between_are_like_the_second_one():
    sizes = {**MODELS["hf:LlamaForCausalLM"], "num_hidden_layers": 4}
    model = ullage.Model("hf:LlamaForCausalLM", batch_size=4, settings=sizes, sequence_length=16, optimizer="sgd")
    found = ullage.estimate(model, gpu="H100", steps=1, ranks=ullage.Ranks(4, parallel="pp"))
    assert [each["rank"] for each in found.ranks] == [0, 1, 2, 3]
    second, third = found.ranks[1:3]
    assert third == {**second, "rank": 2, "like": 1}
    assert found.upper == max(each["upper"] for each in found.ranks)
    assert found.utilization.bubble_s > 0 and found.utilization.samples == 4
    assert any("micro-batches of 1 samples" in note for note in found.notes)


@pytest.mark.slow
def test_the_last_step_of_a_stage_is_foreseen(monkeypatch):
    passes, forward = [], Stage.forward

    def counted(stage, *given, **named):
        passes.append(1)
        return forward(stage, *given, **named)

    monkeypatch.setattr(Stage, "forward", counted)
    sizes = {**MODELS["hf:LlamaForCausalLM"], "num_hidden_layers": 2}

    def last_stage(trace):
        model = ullage.Model("hf:LlamaForCausalLM", batch_size=4, settings=sizes, sequence_length=16)
        ranks = ullage.Ranks(2, follow=(1,), parallel="pp")
        found = ullage.estimate(model, gpu="H100", trace=trace, ranks=ranks)
        return found.to_dict() | {"seconds": 0}

    assert last_stage(None) == last_stage(Trace())  # a trace has every event of every step
    assert len(passes) == 2 * 4 + 3 * 4  # in four micro-batches
