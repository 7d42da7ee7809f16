"""A model of 4.4 billion parameters, built on the CPU and moved to the GPU: time and memory of the estimate itself."""

import resource
import time

import torch

import ullage


def train() -> None:
    """Fine-tune a decoder of Qwen3-4B's shape with AdamW in bf16."""
    import transformers

    config = transformers.Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    model.to("cuda").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.randint(0, config.vocab_size, (1, 1024))
    for _ in range(5):
        batch = tokens.to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.2f} billion parameters")


if __name__ == "__main__":
    begin = time.perf_counter()
    answer = ullage.estimate(train, gpu="H200")
    seconds = time.perf_counter() - begin
    print(answer)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\nQwen3-4B's shape: {seconds:.1f} s, {peak:.2f} GiB of resident memory (goals: 20 s, 2 GiB)")
