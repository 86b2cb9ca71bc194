"""Train on pairs, a better and a worse answer, as DPO does: two texts per sample, tokenized on the workers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import feedline.torch as fl
from small_data import json_lines, model, sums

chats = [row["messages"][1:3] for row in sums(300)]
rows = [{"prompt": ask["content"], "chosen": f"{ask['content']} {answer['content']}", "rejected": f"{ask['content']} no"} for ask, answer in chats]
DATA = json_lines(rows)  # yours
FOLDER = model([text for row in rows for text in row.values()])  # yours: a model's folder

texts = ["prompt", "chosen", "rejected"]
loader = fl.jsonl(
    DATA, columns=[f"{text}:bytes" for text in texts], tokenizer=FOLDER, texts=texts, max_length=32, batch_size=16, shuffle=42
)  # fmt: skip
config = LlamaConfig(vocab_size=400, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
torch.manual_seed(1)
network = LlamaForCausalLM(config).to(loader.device)
optimizer = torch.optim.AdamW(network.parameters(), 1e-3)


def likelihood(batch, text):
    """The logarithm of the probability of each answer behind its prompt."""
    ids, lens = batch[f"{text}_input_ids"].long(), batch[f"{text}_input_ids.lens"].long()
    places = torch.arange(1, ids.shape[1], device=ids.device)
    answer = (places >= batch["prompt_input_ids.lens"].long()[:, None]) & (places < lens[:, None])
    logits = network(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return (logits.gather(-1, ids[:, 1:, None])[..., 0] * answer).sum(-1)


margins = []
for batch in loader:
    # Yours: less the likelihoods of the model before, as DPO wants.
    margin = likelihood(batch, "chosen") - likelihood(batch, "rejected")
    loss = -torch.nn.functional.logsigmoid(0.1 * margin).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    margins.append(margin.mean().item())
print(f"margin {margins[0]:.2f} before, {margins[-1]:.2f} after")
assert margins[-1] > margins[0] + 1
