"""Hugging Face's Trainer (needs transformers and accelerate): a small GPT-2 with evaluation and checkpoints."""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=float, default=1)
parser.add_argument("--length", type=int, default=256)
args = parser.parse_args()


class Texts(torch.utils.data.Dataset):
    def __init__(self, count):
        self.tokens = torch.randint(0, 8000, (count, args.length))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


model = GPT2LMHeadModel(GPT2Config(vocab_size=8000, n_positions=args.length, n_embd=512, n_layer=6, n_head=8))
settings = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=args.batch_size,
    per_device_eval_batch_size=args.batch_size,
    num_train_epochs=args.epochs,
    bf16=True,
    eval_strategy="epoch",
    save_strategy="epoch",
    prediction_loss_only=True,
    logging_steps=5,
    warmup_steps=5,
    report_to=[],
)
trainer = Trainer(model=model, args=settings, train_dataset=Texts(320), eval_dataset=Texts(64))
trainer.train()
print(trainer.evaluate())
print("max_memory_reserved", torch.cuda.max_memory_reserved())
