"""torchvision imports beside any build of PyTorch, each time in a fresh process."""

import importlib.util
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision")


def run(code):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_torchvision_loads_on_use_and_its_models_train():
    output = run(
        """
        import sys, torch
        from ullage.virtual import virtual_gpu
        with virtual_gpu("H200") as gpu:
            print("torchvision" in sys.modules)
            import torchvision
            model = torchvision.models.resnet18().cuda()
            model(torch.randn(2, 3, 64, 64, device="cuda")).sum().backward()
            print(model.fc.weight.grad.is_cuda)
            detection = torchvision.models.detection
            model = detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None).cuda()
            boxes, labels = torch.tensor([[0.0, 0.0, 50.0, 50.0]]), torch.tensor([1])
            target = {"boxes": boxes.cuda(), "labels": labels.cuda()}
            sum(model([torch.rand(3, 100, 100).cuda()], [target]).values()).backward()
            print(model.rpn.head.cls_logits.weight.grad.is_cuda)
            print(any("non-maximum suppression" in note for note in gpu.notes))
        import torchvision.models
        print(torchvision.models.resnet18().eval()(torch.zeros(1, 3, 32, 32)).shape[1])
        """
    )
    assert output == ["False", "True", "True", "True", "1000"]
