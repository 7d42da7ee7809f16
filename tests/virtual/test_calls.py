"""The operator calls of a training step, as the virtual GPU keeps them."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from ullage.hardware import gpu
from ullage.jobs import JobRequest, Model
from ullage.jobs.job import Script
from ullage.performance.alone import utilization_of
from ullage.performance.step import StepCalls, runs_kernels
from ullage.virtual import virtual_gpu
from ullage_lab.following import step_of


def train(model, optimizer, steps=3, batch=5, inputs=8, loss_of=lambda out: out.sum(), after=lambda loss: None):
    for _ in range(steps):
        loss = loss_of(model(torch.zeros(batch, inputs, device="cuda")))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after(loss)


def calls_of(function) -> StepCalls:
    return step_of(JobRequest(function))


def words(step: StepCalls) -> list[str]:
    return [f"{call['pass']} {call['operator'].split('.')[1]}" for call in step]


class MakesItsTable(nn.Module):
    """A layer that makes a table on the CPU in each step, as MPNet does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, value):
        places = torch.arange(64)
        table = (places[:, None] - places[None, :]).abs()
        return self.layer(value) + table[0, 0].to("cuda")


def test_cpu_writes_count_in_modules_and_not_in_data_loading():
    def function():
        model = MakesItsTable().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, after=lambda loss: torch.arange(1000).add(1).mul(2))

    step = calls_of(function)
    assert step.on_host > 5
    assert step.cpu_bytes == 8 * (64 + 2 * 64 * 64)  # the places, differences and distances; views are nothing


def test_the_calls_of_a_linear_layer_in_their_order():
    def function():
        model = nn.Linear(8, 4).cuda()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    step = calls_of(function)
    assert step.steady
    assert words(step) == [
        "outside zeros",
        "forward t",
        "forward addmm",
        "outside sum",
        "outside ones_like",
        "backward expand",
        "backward t",
        "backward mm",
        "backward t",
        "backward sum",
        "backward view",
        "backward t",
        "optimizer _foreach_add_",
    ]
    assert (step.modules, step.optimizer_steps) == (1, 1)
    assert step.nodes == 3  # transposing the weight, the layer, the sum


def test_a_call_says_shapes_strides_types_and_numbers():
    def function():
        layer = nn.Conv2d(4, 8, 3, stride=2, padding=1).cuda().to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(2):
            images = torch.zeros(2, 4, 6, 6, device="cuda").to(memory_format=torch.channels_last)
            with torch.autocast("cuda", torch.bfloat16):
                out = layer(images)
            out.sum().backward()
            optimizer.step()

    found = {call["operator"]: call for call in calls_of(function).calls if call["pass"] == "forward"}
    call = found["aten.convolution.default"]
    assert call["args"][0] == {"shape": [2, 4, 6, 6], "dtype": "bfloat16", "stride": [144, 1, 24, 4]}
    assert call["args"][3:] == [[2, 2], [1, 1], [1, 1], False, [0, 0], 1]
    assert call["outputs"] == [{"shape": [2, 8, 3, 3], "dtype": "bfloat16", "stride": [72, 1, 24, 8]}]
    assert found["aten._to_copy.default"]["kwargs"]["dtype"] == {"dtype": "bfloat16"}


def test_views_run_no_kernel():
    def function():
        weight = nn.Parameter(torch.zeros(4, 6, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            (weight.t().reshape(24) * 2).add_(1).sum().backward()
            optimizer.step()

    kernels = {call["operator"]: runs_kernels(call) for call in calls_of(function).calls}
    assert not kernels["aten.t.default"]
    assert not kernels["aten.view.default"]
    assert kernels["aten.clone.default"] and kernels["aten.mul.Tensor"] and kernels["aten.add_.Tensor"]


@pytest.mark.parametrize(
    ("options", "operators"),
    [
        (
            {"foreach": True},
            {
                "_foreach_add_",
                "_foreach_mul_",
                "_foreach_lerp_",
                "_foreach_sqrt",
                "_foreach_addcmul_",
                "_foreach_div_",
                "_foreach_addcdiv_",
            },
        ),
        ({"fused": True}, {"_foreach_add_", "_fused_adam_"}),
        ({"foreach": False}, {"lerp_", "mul_", "addcmul_", "sqrt", "div", "add_", "addcdiv_"}),
    ],
)
def test_optimizers_over_lists_and_one_by_one(options, operators):
    def function():
        model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)).cuda()
        train(model, torch.optim.Adam(model.parameters(), **options))

    step = calls_of(function)
    assert {call["operator"].split(".")[1] for call in step.calls if call["pass"] == "optimizer"} == operators
    lists = [call for call in step.calls if call["operator"].startswith(("aten._foreach_lerp", "aten._fused"))]
    assert bool(lists) == (options != {"foreach": False})
    for call in lists:
        assert [tensor["shape"] for tensor in call["args"][0]] == [[6, 8], [6], [4, 6], [4]]


def test_arguments_that_are_one_tensor_are_known():
    def function():
        weight = nn.Parameter(torch.zeros(4, 6, device="cuda"))
        optimizer = torch.optim.Adam([weight], foreach=True)
        for _ in range(3):
            copy = weight.exp()
            ((copy * copy).sum() + (copy * weight).sum() + weight.pow(3.0).sum() + weight.pow(2.0).sum()).backward()
            optimizer.step()

    calls = calls_of(function).calls
    products = [
        call.get("same") for call in calls if call["operator"] == "aten.mul.Tensor" and call["pass"] == "outside"
    ]
    assert sorted(products, key=str) == [None, [0, 1]]
    squares = [call.get("same") for call in calls if call["operator"].startswith("aten._foreach_addcmul_")]
    assert squares == [[1, 2]]
    powers = {call["args"][1] for call in calls if call["operator"] == "aten.pow.Tensor_Scalar"}
    assert {2.0, 3.0} <= powers


def test_where_the_host_waits():
    def function():
        model = nn.Linear(8, 4).cuda()

        def after(loss):
            loss.item()
            loss.detach().cpu()
            torch.cuda.synchronize()

        train(model, torch.optim.SGD(model.parameters(), lr=0.1), after=after)

    names = [call["operator"] for call in calls_of(function)]
    assert names[:3] == ["aten._local_scalar_dense.default", "aten._to_copy.default", "cuda.synchronize"]


def test_attention_kernels_go_by_their_names():
    def function():
        layer = nn.Linear(64, 192).cuda().bfloat16()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(2):
            heads = layer(torch.zeros(2, 16, 64, device="cuda", dtype=torch.bfloat16))
            query, key, value = (part.view(2, 16, 2, 32).transpose(1, 2) for part in heads.chunk(3, -1))
            functional.scaled_dot_product_attention(query, key, value).sum().backward()
            optimizer.step()

    names = {call["operator"].split(".")[1] for call in calls_of(function).calls}
    kernels = {name for name in names if "attention" in name}
    assert len(kernels) == 2 and all(name.startswith(("_scaled_dot_product_", "_cudnn")) for name in kernels)


def test_a_step_of_several_optimizers_is_all_of_them():
    def function():
        models = [nn.Linear(8, width).cuda() for width in (4, 2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for _ in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                train(model, optimizer, steps=1)

    step = calls_of(function)
    assert step.steady and step.optimizer_steps == 2
    shapes = [call["outputs"][0]["shape"] for call in step if call["operator"] == "aten.addmm.default"]
    assert sorted(shapes) == [[5, 2], [5, 4]]


def test_a_graph_makes_its_calls_again():
    with virtual_gpu("H200") as gpu:
        x = torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.exp_()
        graph.replay()
        names = [gpu.calls.step()["calls"][number]["operator"] for number in gpu.calls.step()["order"]]
    assert names[-2:] == ["cuda.graph_launch", "aten.exp_.default"]
    assert names.count("aten.exp_.default") == 2


def test_a_run_that_never_repeats_gives_its_last_step():
    def function():
        model = nn.Linear(8, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in (2, 3, 4):
            train(model, optimizer, steps=1, batch=batch)

    step = step_of(JobRequest(function))
    assert not step.steady
    assert [call["args"][1]["shape"] for call in step if call["operator"] == "aten.addmm.default"] == [[4, 8]]


def test_inference_has_iterations_for_steps():
    configuration = Model("mlp:x", settings={"widths": [8, 6, 4]}, batch_size=2, inference=True)
    step = step_of(JobRequest(configuration))
    assert step.steady and step.optimizer_steps == 0
    assert [call["operator"] for call in step].count("aten.addmm.default") == 2
    assert {call["pass"] for call in step.calls} == {"forward", "outside"}


@pytest.mark.slow
def test_a_model_by_name_and_a_script_give_the_same_step(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4)).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
        "inputs, targets = torch.randn(2, 8), torch.randint(0, 4, (2,))\n"
        "for _ in range(6):\n"
        "    x, y = inputs.to('cuda'), targets.to('cuda')\n"
        "    optimizer.zero_grad(set_to_none=True)\n"
        "    torch.nn.functional.cross_entropy(model(x), y).backward()\n"
        "    optimizer.step()\n"
    )
    named = step_of(JobRequest(Model("mlp:x", settings={"widths": [8, 6, 4]}, batch_size=2)))
    followed = step_of(JobRequest(Script(str(script))))
    assert json.loads(json.dumps(followed.to_dict())) == followed.to_dict()
    assert words(followed) == words(named)
    assert followed.steady


@pytest.mark.parametrize("by_the_new_names", [False, True])
def test_products_say_when_they_may_be_rounded_to_tf32(by_the_new_names):
    new_names = getattr(torch._C, "_set_fp32_precision_setter", None)
    if by_the_new_names and new_names is None:
        pytest.skip("this PyTorch does not have torch.backends.cuda.matmul.fp32_precision")

    def round_to_tf32(products, convolutions):
        """As torch.backends does it, also where a test of PyTorch's own has frozen its flags."""
        if by_the_new_names:
            new_names("cuda", "matmul", "tf32" if products else "none")
            new_names("cuda", "conv", "tf32" if convolutions else "ieee")
        else:
            torch._C._set_cublas_allow_tf32(products)
            torch._C._set_cudnn_allow_tf32(convolutions)

    def function():
        round_to_tf32(True, False)
        model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.Flatten(), nn.Linear(12, 4)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.zeros(5, 2, 4, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    try:
        found = {call["operator"].split(".")[1]: call.get("tf32") for call in calls_of(function)}
    finally:
        round_to_tf32(False, True)
        torch._C._set_cublas_allow_tf32(False)
        torch._C._set_cudnn_allow_tf32(True)
    assert found["addmm"] is found["mm"] is True
    assert found["convolution"] is found["convolution_backward"] is False
    assert found["_foreach_add_"] is None


def test_sparse_gradients_leave_their_calls_in_the_step():
    def function():
        model = nn.EmbeddingBag(1000, 8, sparse=True).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.zeros(4, 5, dtype=torch.int64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    step = calls_of(function)
    assert any(call["pass"] == "backward" and call["outputs"] for call in step)
    assert utilization_of(step, gpu("H200")).gpu_s > 0
    json.dumps(step.to_dict())
