"""Small shapes gain nothing from threads, and a loaded machine loses by them."""

import torch

torch.set_num_threads(1)
