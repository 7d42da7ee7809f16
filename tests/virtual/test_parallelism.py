"""PyTorch's ways to spread a training over ranks: they run, and ask for what their code asks for."""

import pytest
import torch
import torch.distributed as dist
from tests.virtual.test_distributed import layers, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ullage.errors import UnsupportedOperation
from ullage.estimation.asking import estimate
from ullage.jobs.job import Ranks
from ullage.jobs.ranks import Rank
from ullage.units import MIB
from ullage.virtual import virtual_gpu
from ullage.virtual.distributed.groups import Groups

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
RANKS = 4


@pytest.fixture
def gpu():
    with Rank(RANKS, 0).entered(), virtual_gpu("H200") as gpu:
        dist.init_process_group("nccl")
        yield gpu


def peak_of(model):
    train(model)  # buckets are made anew, and cuBLAS gets its workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train(model)
    return torch.cuda.max_memory_allocated() - before


def test_the_bound_has_room_for_segments_at_other_addresses(gpu):
    """A ring of buffers: which of two free ones of a size is taken depends on where they are."""

    def take(size):
        return torch.empty(size * MIB, dtype=torch.uint8, device="cuda")

    take(64)
    first, second = take(32), take(32)  # the two halves of it
    third = take(32)
    del second, third
    kept = take(32)  # of the second segment, which is lower; at rising addresses of the first
    del first
    whole = take(64)
    assert torch.cuda.memory_reserved() == 96 * MIB and kept.numel() < whole.numel()
    assert gpu.upper - gpu.context >= (96 + 64) * MIB


def test_zero_redundancy_keeps_a_part_of_the_states(gpu):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.randn(4, 512, device="cuda")).sum().backward()
    optimizer.step()
    states = [value for state in optimizer.optim.state.values() for value in state.values() if value.dim()]
    assert sum(value.nbytes for value in states) == 2 * 8 * MIB // RANKS


@pytest.mark.parametrize("rank", [0, 1])
def test_zero_redundancy_gathers_and_restores_states(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with Rank(RANKS, rank).entered(), virtual_gpu("H200"):
        dist.init_process_group("nccl")
        model = DistributedDataParallel(layers())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
        model(torch.randn(4, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.consolidate_state_dict(to=0)
        assert torch.cuda.memory_allocated() == before
        of_a_rank = 2 * 8 * MIB // RANKS  # as bytes, and as tensors
        assert torch.cuda.max_memory_allocated() - before == pytest.approx(2 * of_a_rank, rel=0.01)
        if rank == 0:
            states = optimizer.state_dict()
            assert [state["exp_avg"].shape for state in states["state"].values()] == [(512, 512)] * 8
            optimizer.load_state_dict(states)
        model(torch.randn(4, 512, device="cuda")).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_writes_and_reads_its_part_of_a_checkpoint(rank, tmp_path):
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("needs fully_shard, which came with PyTorch 2.6")
    with Rank(RANKS, rank).entered(), virtual_gpu("H200"):
        dist.init_process_group("cuda:nccl,cpu:gloo")
        model = layers()
        for layer in model:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            model(torch.randn(4, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        before = torch.cuda.memory_allocated()
        weights, states = get_state_dict(model, optimizer)
        checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "a")
        checkpoint.load({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "a")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        saving = checkpoint.async_save({"model": weights}, checkpoint_id=tmp_path / "b")
        getattr(saving, "upload_completion", saving).result()
        del weights, states, saving
        assert torch.cuda.memory_allocated() == before
        step()


def test_pieces_of_flat_parameters_lie_side_by_side(gpu):
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = FullyShardedDataParallel(layers(), device_id=0)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        (flat,) = model.state_dict().values()
    places = [(shard.shard_offsets, shard.placement.rank()) for shard in flat.metadata().shards_metadata]
    piece = 8 * 512 * 512 // RANKS
    assert places == [([rank * piece], rank) for rank in range(RANKS)]


def test_gradients_as_bucket_views_need_no_memory(gpu):
    def gradients(**options):
        model = DistributedDataParallel(layers(), **options)
        train(model)
        model(torch.zeros(4, 512, device="cuda")).sum().backward()
        return {gpu.memory.span_of(parameter.grad).index for parameter in model.parameters()}

    assert len(gradients(gradient_as_bucket_view=True)) < len(gradients()) == 8


@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}])
def test_a_graph_that_is_watched_settles(gpu, options):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = layers(2), layers(2)

        def forward(self, inputs):
            return self.used(inputs)

    model = DistributedDataParallel(layers(2) if "static_graph" in options else Half(), **options)
    train(model)
    after_first = torch.cuda.memory_allocated()
    train(model)
    assert torch.cuda.memory_allocated() == after_first


def test_communication_hooks_send_what_they_make_of_a_bucket(gpu):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    plain = peak_of(DistributedDataParallel(layers()))
    compressed = DistributedDataParallel(layers())
    compressed.register_comm_hook(None, default_hooks.fp16_compress_hook)
    assert peak_of(compressed) > plain
    in_cpp = DistributedDataParallel(layers())
    in_cpp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    assert peak_of(in_cpp) > plain
    approximated = DistributedDataParallel(layers())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    approximated.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(approximated)
    assert state.error_dict, "it keeps what it left out for the next step"


def test_full_optimizer_checkpoint_has_the_states_of_all_ranks(gpu):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(layers(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 512, device="cuda")).sum().backward()
    optimizer.step()
    assert len(optimizer.state) < 8
    states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    assert [state["exp_avg"].shape for state in states.values()] == [(512, 512)] * 8


def test_normalization_over_all_ranks(gpu):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).cuda()
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    images = torch.randn(2, 3, 16, 16, device="cuda", requires_grad=True)
    out = model(images)
    out.sum().backward()
    assert out.shape == (2, 8, 14, 14) and images.grad.shape == images.shape
    assert model.module[1].weight.grad.shape == (8,)


def test_context_parallelism_splits_sequences(gpu):
    experimental = pytest.importorskip("torch.distributed.tensor.experimental")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (RANKS,))
    inputs = torch.randn(1, 64 * RANKS, 128, device="cuda", dtype=torch.bfloat16)
    project = nn.Linear(128, 3 * 128, device="cuda", dtype=torch.bfloat16)
    with experimental.context_parallel(mesh, buffers=[inputs], buffer_seq_dims=[1], no_restore_buffers={inputs}):
        query, key, value = project(inputs).view(1, -1, 3, 2, 64).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out.sum().backward()
    assert out.shape == (1, 2, 64, 64)


def pipeline(kind, rank, received=None, shape=None):
    """What a rank of a pipeline allocates at most, and what it sends. The stages may know the shape that they pass."""
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    with Rank(RANKS, rank).entered(), virtual_gpu("H200") as gpu:
        dist.init_process_group("nccl")
        messages = gpu.part(Groups).messages
        messages.received = dict(received or {})
        device = torch.device("cuda", rank)
        several = "Interleaved" in kind or "ZBV" in kind
        count = RANKS * (2 if several else 1)
        numbers = [rank, count - 1 - rank] if "ZBV" in kind else range(rank, count, RANKS)
        known = {} if shape is None else dict.fromkeys(("input_args", "output_args"), torch.empty(shape, device="meta"))
        stages = [pipelining.PipelineStage(layers(2), number, count, device, **known) for number in numbers]
        schedule = getattr(pipelining, kind)(
            stages if several else stages[0], n_microbatches=8, loss_fn=nn.functional.mse_loss
        )
        inputs = torch.randn(64 * 8, 512, device="cuda")
        for _ in range(2):
            given = [inputs] if 0 in numbers else []
            schedule.step(*given, **({"target": inputs, "losses": []} if count - 1 in numbers else {}))
        groups = gpu.part(Groups)
        return torch.cuda.max_memory_allocated(), messages.sent, list(gpu.notes), groups.apart, gpu.calls.bubble


def test_pipeline_stages_hold_microbatches_of_their_schedule():
    one_by_one, sent, _, apart, _ = pipeline("Schedule1F1B", 0)
    assert apart == list(range(RANKS))
    all_at_once = pipeline("ScheduleGPipe", 0)[0]
    assert all_at_once > one_by_one, "the first stage has 4 of 8 under way"
    last, _, notes, _, _ = pipeline("Schedule1F1B", RANKS - 1, sent)
    assert [note for note in notes if note.startswith("recv_object_list: objects of another rank are assumed")]
    middle = pipeline("Schedule1F1B", 1, sent)[0]
    assert middle < one_by_one + 2 * MIB and last > 0


@pytest.mark.slow
def test_stages_that_know_their_shapes_ask_no_other_one():
    told = pipeline("Schedule1F1B", RANKS - 1, pipeline("Schedule1F1B", 0)[1])[0]
    assert pipeline("Schedule1F1B", RANKS - 1, shape=(64, 512))[0] <= told, "no forward pass to learn them, either"


def test_a_stage_out_of_memory_reports_how_much_it_needs():
    pipelining = pytest.importorskip("torch.distributed.pipelining")

    def run():
        dist.init_process_group("nccl")
        stage = pipelining.PipelineStage(layers(2), 0, RANKS, torch.device("cuda", 0))
        schedule = pipelining.ScheduleGPipe(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
        schedule.step(torch.randn(8 << 20, 512, device="cuda"))

    found = estimate(run, gpu="T4", ranks=Ranks(RANKS, follow=[0]))
    assert not found.fits and found.peak_reserved > found.gpu_memory


def test_the_bubble_of_a_pipeline_lengthens_the_step_of_a_stage():
    pipelining = pytest.importorskip("torch.distributed.pipelining")

    def run():
        dist.init_process_group("nccl")
        model = layers(2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        stage = pipelining.PipelineStage(model, 0, RANKS, torch.device("cuda", 0))
        schedule = pipelining.Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
        for _ in range(6):
            schedule.step(torch.randn(64 * 8, 512, device="cuda"))
            optimizer.step()
            optimizer.zero_grad()

    found = estimate(run, gpu="H200", ranks=Ranks(RANKS, follow=[0])).utilization
    assert found.bubble_s == pytest.approx((found.step_s - found.bubble_s) * (RANKS - 1) / 8)
    assert "the pipeline's bubble adds" in found.step_words


def test_the_bubble_is_that_of_the_schedule():
    """Four ranks and eight micro-batches: 3 / 8 of the work in 1F1B, half of that with two stages on each rank."""
    assert pipeline("Schedule1F1B", 0)[-1] is None, "it follows from the messages"
    interleaved, zero, vee = (
        pipeline(kind, 0)[-1]
        for kind in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
    )
    assert interleaved == pytest.approx(3 / 16)
    assert vee <= zero < interleaved


def test_interleaved_stages_of_one_rank_follow_each_other():
    interleaved = pipeline("ScheduleInterleaved1F1B", 0)[0]
    without_bubble = pipeline("ScheduleInterleavedZeroBubble", 0)[0]
    assert without_bubble > interleaved > 0, "what the gradients of weights need is kept until the bubble"


def test_a_rank_with_first_and_last_stage_has_no_bubble():
    assert pipeline("ScheduleZBVZeroBubble", 0)[0] > 0


def test_a_stage_that_nothing_is_sent_to_says_so():
    with pytest.raises(UnsupportedOperation, match="waits for objects of another"):
        pipeline("ScheduleGPipe", 1)


def test_the_rank_that_takes_most_decides():
    def run():
        dist.init_process_group("nccl")
        weights = torch.zeros(MIB * (1 + dist.get_rank()), device="cuda", requires_grad=True)
        for _ in range(6):
            (weights * 2).sum().backward()

    found = estimate(run, gpu="H200", ranks=Ranks(4, follow=[0, 3, 1]))
    assert [each["rank"] for each in found.ranks] == [0, 3, 1]
    assert (
        found.process_memory == max(each["process_memory"] for each in found.ranks) == found.ranks[1]["process_memory"]
    )
    assert "ranks 0, 1, 3 were followed" in found.notes[0] and "rank 3" in str(found)
