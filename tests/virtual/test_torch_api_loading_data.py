"""DataLoaders, threads, mixed precision and DataParallel work as with a GPU."""

import queue
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ullage.virtual import virtual_gpu


class Images(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((100, 100), float(index)), index


@pytest.fixture
def gpu():
    with virtual_gpu("H200") as gpu:
        yield gpu


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [False, True])
def test_data_loaders_deliver(gpu, workers, pinned):
    loader = DataLoader(Images(), batch_size=4, num_workers=workers, pin_memory=pinned)
    labels = []
    for images, numbers in loader:
        assert images.is_pinned() == pinned
        assert images[:, 0, 0].tolist() == numbers.tolist()
        assert images.to("cuda", non_blocking=True).shape == (4, 100, 100)
        labels += numbers.cuda(non_blocking=True).tolist()
    assert labels == list(range(8))


def test_tensors_of_other_threads_are_counted(gpu):
    batches = queue.Queue()
    thread = threading.Thread(target=lambda: batches.put(torch.randn(1000).to("cuda", non_blocking=True)))
    thread.start()
    thread.join()
    assert torch.cuda.memory_allocated() == 4096
    assert batches.get().shape == (1000,)


def test_other_threads_can_train(gpu):
    layer, errors = nn.Linear(10, 10).cuda(), []

    def train():
        try:
            layer(torch.ones(2, 10, device="cuda")).sum().backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert not errors and layer.weight.grad.is_cuda


def test_thread_outliving_the_virtual_gpu_has_ordinary_tensors():
    proceed, results = threading.Event(), []

    def work():
        assert proceed.wait(60)
        results.append(torch.ones(100, 100).numpy().sum())

    with virtual_gpu("H200"):
        thread = threading.Thread(target=work)
        thread.start()
    proceed.set()
    thread.join()
    assert results == [10000]


@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_mixed_precision_trains(gpu, old_names):
    layer = nn.Linear(10, 10).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler = torch.cuda.amp.GradScaler() if old_names else torch.amp.GradScaler("cuda")
    with torch.cuda.amp.autocast() if old_names else torch.autocast("cuda", torch.float16):
        y = layer(torch.ones(2, 10, device="cuda"))
    assert y.dtype is torch.float16
    scaler.scale(y.float().sum()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def test_data_parallel_on_one_gpu_calls_the_module(gpu):
    model = nn.DataParallel(nn.Linear(3, 4)).cuda()
    assert model(torch.ones(2, 3)).shape == (2, 4)
    model(torch.ones(2, 3, device="cuda")).sum().backward()
    assert model.module.weight.grad.shape == (4, 3)
