"""Parsing PYTORCH_ALLOC_CONF."""

from __future__ import annotations

import pytest

from ullage.allocator import AllocatorConfig, AllocatorConfigError

MIB = 2**20
parse = AllocatorConfig.parse


def test_nothing_set_is_the_default() -> None:
    assert parse("") == AllocatorConfig() == AllocatorConfig.from_environment({})


def test_sizes_are_in_mib() -> None:
    config = parse("max_split_size_mb:128, max_non_split_rounding_mb:40,large_segment_size_mb:30")
    assert config.max_split_size == 128 * MIB
    assert config.max_non_split_rounding == 40 * MIB
    assert config.large_segment_size == 30 * MIB


def test_the_rounding_limit_follows_the_large_segment_size() -> None:
    assert parse("large_segment_size_mb:64").max_non_split_rounding == 64 * MIB


def test_flags_and_numbers() -> None:
    config = parse("expandable_segments:True,garbage_collection_threshold:0.6,per_process_memory_fraction:0.25")
    assert config.expandable_segments
    assert config.garbage_collection_threshold == 0.6
    assert config.memory_fraction == 0.25


def test_one_number_of_divisions_holds_for_all_sizes() -> None:
    assert parse("roundup_power2_divisions:8").roundup_power2_divisions == (8,) * 16


def test_a_list_of_divisions_by_size() -> None:
    # 256, 512 and 1024 MiB are entries 8, 9 and 10; the first value also holds for everything below.
    table = parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]").roundup_power2_divisions
    assert table == (1,) * 9 + (2, 4) + (8,) * 5


def test_the_example_of_pytorchs_own_test() -> None:
    # c10/test/core/AllocatorConfig_test.cpp
    table = parse("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]").roundup_power2_divisions
    assert [table[i] for i in (5, 6, 7, 8, 9, 10, 11, 12)] == [8, 8, 2, 4, 2, 4, 1, 1]


def test_options_without_effect_are_accepted() -> None:
    text = "backend:native,pinned_use_background_threads:True,release_lock_on_cudamalloc:True"
    assert parse(text) == AllocatorConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("backend:cudaMallocAsync", "cudaMallocAsync"),
        ("max_split_size:20", "max_split_size"),
        ("max_split_size_mb", "name:value"),
        ("max_split_size_mb:", "name:value"),
        ("max_split_size_mb:19", "at least 20, got 19"),
        ("max_split_size_mb:many", "whole number, got 'many'"),
        ("max_non_split_rounding_mb:1", "at least 20, got 1"),
        ("large_segment_size_mb:10", "more than 10, got 10"),
        ("expandable_segments:true", "True or False, got 'true'"),
        ("garbage_collection_threshold:0", "between 0 and 1, got 0"),
        ("garbage_collection_threshold:1.0", "between 0 and 1, got 1"),
        ("garbage_collection_threshold:x", "a number, got 'x'"),
        ("per_process_memory_fraction:1.5", "from 0 to 1, got 1.5"),
        ("roundup_power2_divisions:3", "powers of two, got 3"),
        ("roundup_power2_divisions:[3:2]", "powers of two, got 3"),
        ("roundup_power2_divisions:[256:3]", "powers of two, got 3"),
        ("roundup_power2_divisions:[256:2", "closing bracket"),
    ],
)
def test_refusals_of_pytorch_are_one_sentence(text: str, words: str) -> None:
    with pytest.raises(AllocatorConfigError, match=words):
        parse(text)


def test_the_newer_variable_goes_first() -> None:
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
    }
    assert AllocatorConfig.from_environment(environment).max_split_size == 64 * MIB
    del environment["PYTORCH_ALLOC_CONF"]
    assert AllocatorConfig.from_environment(environment).max_split_size == 32 * MIB


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert AllocatorConfig.from_environment().expandable_segments
