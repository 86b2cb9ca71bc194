"""Train on a machine that may be taken away at any time: go on with the next batch, as if nothing had happened."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import feedline.torch as fl
from small_data import folder, pictures

EPOCHS = 3


def train(data: str, run: Path, killed_at: int) -> None:
    torch.manual_seed(1)
    # SIGTERM ends the loop after a whole batch.
    loader = fl.images(data, size=32, dtype="f32", batch_size=16, shuffle=42, stop_on_signals=True)
    model = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 4)).to(loader.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    if (run / "last.pt").exists():
        saved = torch.load(run / "last.pt", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    def save() -> None:
        torch.save({name: part.state_dict() for name, part in parts.items()}, run / "new.pt")
        os.replace(run / "new.pt", run / "last.pt")  # whole, or not at all

    steps = 0
    while loader.next_epoch < EPOCHS and not loader.stop_requested:
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps % 4 == 0:  # yours: every few minutes
                save()
            if steps == killed_at:  # yours: leave this out
                os.kill(os.getpid(), signal.SIGKILL if killed_at % 2 else signal.SIGTERM)
    save()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
        sys.exit()
    data, whole, parts = pictures(200), folder(), folder()
    subprocess.run([sys.executable, __file__, data, whole, "0"], check=True)
    for killed_at in (7, 10, 0):  # SIGKILL, SIGTERM, and to the end
        print(f"a run, killed at step {killed_at}" if killed_at else "a run to the end")
        subprocess.run([sys.executable, __file__, data, parts, str(killed_at)])
    one, other = (torch.load(run / "last.pt", weights_only=True) for run in (whole, parts))
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"]), "the same model, bit for bit"
    assert one["loader"] == other["loader"]
