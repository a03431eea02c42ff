"""PyTorch with Accelerate: `prepare`, `accumulate`, `save_state` each epoch."""

from pathlib import Path

import torch
from accelerate import Accelerator
from job import (
    ACCUMULATE,
    BATCH,
    CLASSES,
    EPOCHS,
    FOLDER,
    HIDDEN,
    RATE,
    WIDTH,
    data,
    pause,
    save,
    weights,
)
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=True)
model = torch.nn.Sequential(
    torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)
)
with torch.no_grad():
    for parameter, array in zip(model.parameters(), weights(), strict=True):
        parameter.copy_(torch.from_numpy(array.T))
rows = data()
tensors = TensorDataset(
    torch.from_numpy(rows["x"]),
    torch.from_numpy(rows["label"]).long(),
    torch.from_numpy(rows["mask"]),
)
loader = DataLoader(tensors, batch_size=BATCH // ACCUMULATE // accelerator.num_processes)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
first_epoch = 0
if FOLDER and Path(f"{FOLDER}/newest").is_dir():
    accelerator.load_state(f"{FOLDER}/newest")
    first_epoch = int(Path(f"{FOLDER}/epoch").read_text()) + 1
for epoch in range(first_epoch, EPOCHS):
    for x, label, mask in loader:
        pause()
        with accelerator.accumulate(model):
            logits = model(x).flatten(0, 1)
            losses = cross_entropy(logits, label.flatten(), reduction="none")
            loss = (losses * mask.flatten()).sum() / mask.sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    if FOLDER:
        accelerator.save_state(f"{FOLDER}/newest")
        if accelerator.is_main_process:
            Path(f"{FOLDER}/epoch").write_text(str(epoch))
        accelerator.wait_for_everyone()
save([each.detach().numpy().T for each in accelerator.unwrap_model(model).parameters()])
accelerator.end_training()
