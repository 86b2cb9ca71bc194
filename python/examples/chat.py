"""Fine-tune on conversations in JSON lines: the model's chat template, tokens and loss mask, on the workers."""

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import feedline.torch as fl
from small_data import json_lines, model, sums

rows = sums(400)
DATA = json_lines(rows)  # yours: lines {"messages": [{"role": "user", "content": "…"}, …], "tools": […]}
FOLDER = model([message["content"] for row in rows for message in row["messages"]])  # yours: a model's folder

loader = fl.jsonl(DATA, tokenizer=FOLDER, chat=True, max_length=128, truncation="right", batch_size=16, shuffle=42)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128
)  # fmt: skip
torch.manual_seed(1)
network = LlamaForCausalLM(config).to(loader.device)
optimizer = torch.optim.AdamW(network.parameters(), 3e-3)

losses = []
for epoch in range(4):
    for batch in loader:
        ids = batch["input_ids"].long()  # [16, 128], padded by zeros
        real = torch.arange(ids.shape[1], device=ids.device) < batch["input_ids.lens"].long()[:, None]
        labels = torch.where(batch["loss"] > 0, ids, -100)  # the answers alone: what stands in {% generation %}
        loss = network(input_ids=ids, attention_mask=real, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
print(f"loss {losses[0]:.2f} before, {losses[-1]:.2f} after")
assert losses[-1] < 0.7 * losses[0]

# The same tokens as transformers has them.
first = next(iter(fl.jsonl(DATA, tokenizer=FOLDER, chat=True, max_length=128, batch_size=1)))
length = int(first["input_ids.lens"][0])
right = tokenizer.apply_chat_template(rows[0]["messages"], return_dict=True, return_assistant_tokens_mask=True)
assert first["input_ids"][0, :length].tolist() == right["input_ids"] and first["loss"][0, :length].tolist() == right["assistant_masks"]
