"""LoRA through peft (needs peft and transformers): a frozen bf16 Llama with gradient checkpointing."""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--length", type=int, default=512)
args = parser.parse_args()

config = LlamaConfig(
    hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, vocab_size=16000
)
model = LlamaForCausalLM(config).to(torch.bfloat16)
model.config.use_cache = False
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], lora_dropout=0.05))
model.print_trainable_parameters()
model.cuda().train()
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
for step in range(args.steps):
    tokens = torch.randint(0, config.vocab_size, (args.batch_size, args.length), device="cuda")
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f}")

print("max_memory_reserved", torch.cuda.max_memory_reserved())
