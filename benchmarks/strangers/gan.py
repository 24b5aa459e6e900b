"""Two models trained alternately, as in PyTorch's DCGAN example.

torchrun --nproc-per-node 2 gan.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

nz, real_label, fake_label = 16, 1.0, 0.0
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(dist.get_rank())
netG = DistributedDataParallel(nn.Sequential(nn.Linear(nz, 64), nn.ReLU(), nn.Linear(64, 32), nn.Tanh()))
netD = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)))
criterion = nn.BCEWithLogitsLoss()
optimizerD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
for _ in range(int(os.environ.get("STEPS", "400"))):
    # (1) update D: maximize log(D(x)) + log(1 - D(G(z)))
    netD.zero_grad()
    real = torch.randn(16, 32)
    errD_real = criterion(netD(real), torch.full((16, 1), real_label))
    errD_real.backward()
    fake = netG(torch.randn(16, nz))
    errD_fake = criterion(netD(fake.detach()), torch.full((16, 1), fake_label))
    errD_fake.backward()
    optimizerD.step()
    # (2) update G: maximize log(D(G(z)))
    netG.zero_grad()
    errG = criterion(netD(fake), torch.full((16, 1), real_label))
    errG.backward()
    optimizerG.step()
dist.destroy_process_group()
