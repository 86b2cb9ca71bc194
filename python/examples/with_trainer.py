"""Train with Transformers' Trainer: the loader takes the place of its DataLoader."""

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import feedline.torch as fl
from feedline.transformers import LoaderState
from small_data import folder, pictures

TRAIN, VALIDATION, RUN = pictures(200), pictures(40, seed=2), folder()  # yours: folders
as_dict = {"size": 32, "dtype": "f32", "batch_size": 16, "output": "dict"}
train, validation = fl.images(TRAIN, shuffle=42, **as_dict), fl.images(VALIDATION, **as_dict)


class Classifier(nn.Module):  # yours: a model of Transformers
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 4))

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(image)
        return {"loss": nn.functional.cross_entropy(logits, label), "logits": logits}


class Fed(Trainer):
    def get_train_dataloader(self):
        return train

    def get_eval_dataloader(self, eval_dataset=None):
        return validation


def accuracy(predictions):
    return {"accuracy": (predictions.predictions.argmax(1) == predictions.label_ids).mean()}


arguments = TrainingArguments(
    RUN, num_train_epochs=3, learning_rate=0.02, eval_strategy="epoch", save_strategy="epoch", label_names=["label"],
    per_device_train_batch_size=16, report_to=[], disable_tqdm=True,
)  # fmt: skip
# Trainer wants a dataset where it evaluates; the rows are those of `get_eval_dataloader`.
trainer = Fed(Classifier(), arguments, callbacks=[LoaderState(train)], compute_metrics=accuracy, eval_dataset=[0])
trainer.train()  # later: trainer.train(resume_from_checkpoint=True)
result = trainer.evaluate()
print(result)
assert trainer.state.global_step == 3 * len(train) and result["eval_accuracy"] > 0.9
