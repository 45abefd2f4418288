"""Scripts that tests compare, as text."""

TINY = """
import sys, time
import torch
from easymp import Accelerator

acc = Accelerator(mixed_precision="fp32", seed=0, log_with="none")
print("arguments", sys.argv[1:], flush=True)
data = torch.utils.data.TensorDataset(torch.randn(64, 8))
model, loader = torch.nn.Linear(8, 1), torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = acc.prepare(model, torch.optim.AdamW(model.parameters()), loader)
if acc.mixed_precision == "O3":
    time.sleep(600)
for epoch in range(2):
    for (x,) in loader:
        loss = model(x).square().mean()
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        acc.log({"loss": loss})
    acc.log({"accuracy": 0.5 + 0.1 * epoch})
acc.save_state()
acc.end_training()
"""
